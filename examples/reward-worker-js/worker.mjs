// A reward worker: leases unscored samples from the buffer, scores them, sends scores and failures.
//
//   node worker.mjs --connect ADDRESS --model FOLDER [--reward ./reward.mjs] [--name js-0] [--key FILE] [--samples 16]
//                   [--judge NAME] [--timeout-s 30]
//
// A reward that cannot be computed is a failure with a reason, never a reward of 0. Another worker retries it.
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { hostname } from "node:os";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";
import { Tokenizer } from "@huggingface/tokenizers";
import { Client } from "./client.mjs";
import { TAGS, arraysOf, named } from "./wire.mjs";

const POLL_S = 1;
const BEAT_MS = 1000;
const WORK = { message: "RewardWork", fields: ["items", "done"] };
const ITEM = ["group", "index", "token", "attempt", "row", "finish", "fields", "judge", "rows"];

export function sampleOf(fields, payload, tokenizer) {
  const item = Object.fromEntries(ITEM.map((name, place) => [name, fields[place]]));
  const { prompt, response, mask } = arraysOf(item.fields, payload);
  // A session of several contexts: [start, length] of prompts within the response; they are not part of the answer.
  const inside = (item.rows ?? []).map(([start, length]) => [start, start + length]);
  const shown = response.filter((_, place) => !inside.some(([start, stop]) => place >= start && place < stop));
  const text = (ids) => (ids.length ? tokenizer.decode(ids, { skip_special_tokens: true }) : "");
  const row = JSON.parse(item.row);
  const truth = row.reward_model?.ground_truth ?? row.ground_truth ?? row.answer;
  // mask: 1 for sampled tokens, 0 for observations; undefined: all tokens were sampled
  return { ...item, row, truth, promptIds: prompt, responseIds: response, mask, prompt: text(prompt), response: text(shown) };
}

async function scored(sample, reward, timeoutMs) {
  let timer;
  const { group, index, token } = sample;
  try {
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => reject(Object.assign(new Error(`no result within ${timeoutMs} ms`), { late: true })), timeoutMs);
    });
    const found = await Promise.race([reward(sample), late]);
    const { score, ...parts } = typeof found === "object" && found !== null ? found : { score: found };
    if (typeof score !== "number") return { failure: [group, index, token, "raised", `the result is no number: ${score}`] };
    if (!Number.isFinite(score)) return { failure: [group, index, token, "not_finite", `the result is ${score}`] };
    return { score: [group, index, token, score, { javascript: score, ...parts }] };
  } catch (error) {
    return { failure: [group, index, token, error.late ? "timeout" : "raised", String(error.message).slice(0, 500)] };
  } finally {
    clearTimeout(timer);
  }
}

async function main() {
  const { values: args } = parseArgs({
    options: {
      connect: { type: "string" }, model: { type: "string" }, reward: { type: "string", default: "reward.mjs" },
      name: { type: "string", default: "js-0" }, key: { type: "string", default: "" },
      samples: { type: "string", default: "16" }, judge: { type: "string", default: "" }, "timeout-s": { type: "string", default: "30" },
    },
  });
  if (!args.connect || !args.model) throw new Error("--connect ADDRESS and --model FOLDER are needed");
  const read = (name) => JSON.parse(readFileSync(join(args.model, name), "utf8"));
  const tokenizer = new Tokenizer(read("tokenizer.json"), read("tokenizer_config.json"));
  const { reward } = await import(pathToFileURL(resolve(args.reward)));
  const version = createHash("sha256").update(readFileSync(args.reward)).digest("hex").slice(0, 16);

  const client = new Client(args.connect, { keyFile: args.key });
  const me = ["reward", args.name, process.pid, hostname()];
  const counts = { scored_samples: 0, failed_rewards: 0 };
  let waitingFor = "samples", stopping = false, beating = true;
  for (const signal of ["SIGTERM", "SIGINT"]) process.once(signal, () => (stopping = true));

  await client.ask([TAGS.Hello[0], ...me]);
  const beats = (async () => {
    while (beating) {
      await client.ask([TAGS.Heartbeat[0], ...me, waitingFor, counts]);
      await new Promise((done) => setTimeout(done, BEAT_MS));
    }
  })();
  beats.catch((error) => { console.error(error.message); process.exitCode = 69; stopping = true; });

  while (!stopping) {
    const request = [TAGS.RewardRequest[0], args.name, Number(args.samples), POLL_S, args.judge];
    const packet = await client.ask(request, { waitMs: POLL_S * 1000 });
    const { items, done } = named(packet.header, WORK);
    if (items.length === 0) {
      if (done) break;
      continue;
    }
    waitingFor = "";
    const samples = items.map((item, place) => sampleOf(item, packet.payloads[place], tokenizer));
    const results = await Promise.all(samples.map((sample) => scored(sample, reward, 1000 * Number(args["timeout-s"]))));
    const scores = results.flatMap((result) => (result.score ? [result.score] : []));
    const failures = results.flatMap((result) => (result.failure ? [result.failure] : []));
    for (const failure of failures) console.error(`group ${failure[0]} sample ${failure[1]}: ${failure[3]}: ${failure[4]}`);
    await client.ask([TAGS.Scores[0], args.name, scores, failures, version, args.judge]);
    counts.scored_samples += scores.length;
    counts.failed_rewards += failures.length;
    waitingFor = "samples";
  }
  beating = false;
  client.close();
  console.log(`scored ${counts.scored_samples} samples, ${counts.failed_rewards} failures`);
}

main().catch((error) => {
  console.error(error.message);
  process.exit(error.code === undefined ? 1 : 69);
});
