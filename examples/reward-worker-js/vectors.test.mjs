// The conformance vectors of the protocol: JavaScript decodes Python's frames and encodes the same bytes.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { TAGS, WireError, arraysOf, decode, encode, named, xxh3 } from "./wire.mjs";

const vectors = JSON.parse(readFileSync(new URL("../../tests/vectors/wire.json", import.meta.url), "utf8"));
const framesOf = (item) => item.frames.map((frame) => Buffer.from(frame, "hex"));
const LENIENT = /surplus|another type|UTF-8/; // accepted here: the service checks its own messages
const CODES = new Set(["wire.prefix", "wire.schema", "wire.size", "wire.checksum"]);

// A decoded value in the form of the file.
function plain(value) {
  if (typeof value === "bigint") {
    const small = value >= -(2n ** 53n) && value <= 2n ** 53n;
    return small ? Number(value) : { int: String(value) };
  }
  if (value instanceof Uint8Array) return { hex: Buffer.from(value).toString("hex") };
  if (Array.isArray(value)) return value.map(plain);
  if (value !== null && typeof value === "object") return { map: Object.entries(value).map(([key, item]) => [key, plain(item)]) };
  return value;
}

// JavaScript converts keys of an object to text.
function textKeys(value) {
  if (Array.isArray(value)) return value.map(textKeys);
  if (value !== null && typeof value === "object" && value.map) return { map: value.map.map(([key, item]) => [String(key), textKeys(item)]) };
  return value;
}

test("the checksum is that of Python", () => {
  for (const item of vectors.xxh3_64) assert.equal(xxh3([Buffer.from(item.bytes, "hex")]), BigInt(`0x${item.hash}`));
});

test("every message is read", () => {
  assert.ok(vectors.good.length > 40);
  for (const item of vectors.good) {
    const packet = decode(framesOf(item));
    assert.deepEqual(plain(packet.header), textKeys(item.header), item.name);
    assert.deepEqual(plain(packet.request), item.request);
    assert.equal(packet.kind, item.kind);
    assert.deepEqual(packet.payloads.map((payload) => payload.toString("hex")), item.payloads);
  }
});

test("what this side sends are the bytes of Python", () => {
  for (const name of ["Refused", "StatusRequest", "Stop", "RewardWork"]) {
    const item = vectors.good.find((other) => other.name === name);
    const packet = decode(framesOf(item));
    const again = encode(packet.header, { payloads: packet.payloads, request: packet.request, kind: packet.kind });
    assert.deepEqual(again.map((frame) => frame.toString("hex")), item.frames, name);
  }
});

test("frames that are damaged or of another schema are refused by their code", () => {
  const cases = vectors.bad.filter((item) => CODES.has(item.error));
  assert.ok(cases.length >= 12);
  for (const item of cases) {
    assert.throws(() => decode(framesOf(item)), (error) => error instanceof WireError && error.code === item.error, item.why);
  }
});

test("headers that are no message are refused", () => {
  const shapes = { "a missing field": "RewardRequest", "an unknown tag": "RewardRequest" };
  const cases = vectors.bad.filter((item) => item.error === "wire.decode" && !LENIENT.test(item.why));
  assert.ok(cases.length >= 5);
  for (const item of cases) {
    const read = () => named(decode(framesOf(item)).header, { message: shapes[item.why] ?? "RewardWork", fields: [] });
    assert.throws(read, WireError, item.why);
  }
});

test("arrays are found by their fields", () => {
  const { fields, payload, values } = vectors.arrays;
  assert.deepEqual(arraysOf(fields, Buffer.from(payload, "hex")), values);
});

test("the tags are those of the messages", () => {
  for (const item of vectors.good.filter((other) => other.name in TAGS)) assert.equal(item.header[0], TAGS[item.name][0]);
});
