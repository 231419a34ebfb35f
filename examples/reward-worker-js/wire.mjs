// The wire protocol of asyncrl: frames to messages and back. docs/wire.md lists the messages and their fields.
//
// A message is [prefix 32 bytes][header: msgpack array [tag, field, ...]][payload]... Numbers beyond 2^53 are BigInts.
import { Decoder, Encoder } from "@msgpack/msgpack";
import { createXXHash3 } from "hash-wasm";

export const SCHEMA = 1;
export const REQUEST = 0;
export const REPLY = 1;
const PREFIX_BYTES = 32;
const CHECK_AT = 24;
const KINDS = 3;

// name -> [tag, number of required fields]: the messages of a reward worker.
export const TAGS = {
  Hello: [1, 4], Welcome: [2, 4], Refused: [3, 2], Ok: [4, 0], Heartbeat: [5, 5],
  RewardRequest: [30, 3], RewardWork: [31, 1], Scores: [32, 2], ScoresReply: [33, 1],
};

const hasher = await createXXHash3();
const encoder = new Encoder({ useBigInt64: true });
const decoder = new Decoder({ useBigInt64: true });

export class WireError extends Error {
  constructor(code, message) {
    super(`${code}: ${message}`);
    this.code = code;
  }
}

// xxh3_64 of concatenated buffers, as a BigInt.
export function xxh3(buffers) {
  hasher.init();
  for (const buffer of buffers) hasher.update(buffer);
  return BigInt(`0x${hasher.digest("hex")}`);
}

export function encode(header, { payloads = [], request = 0n, kind = REQUEST } = {}) {
  const body = Buffer.from(encoder.encode(header));
  const prefix = Buffer.alloc(PREFIX_BYTES);
  prefix.write("ARL1", 0, "latin1");
  prefix.writeUInt8(SCHEMA, 4);
  prefix.writeUInt8(kind, 5);
  prefix.writeUInt16LE(payloads.length, 6);
  prefix.writeBigUInt64LE(BigInt(request), 8);
  prefix.writeBigUInt64LE(BigInt(payloads.reduce((sum, payload) => sum + payload.length, 0)), 16);
  const check = xxh3([body, ...payloads]) ^ xxh3([prefix.subarray(0, CHECK_AT)]);
  prefix.writeBigUInt64LE(check, CHECK_AT);
  return [prefix, body, ...payloads];
}

export function decode(frames) {
  const [prefix, body, ...payloads] = frames;
  if (frames.length < 2 || prefix.length !== PREFIX_BYTES) throw new WireError("wire.prefix", "not a prefix and a header");
  if (prefix.toString("latin1", 0, 4) !== "ARL1") throw new WireError("wire.prefix", "another magic");
  const schema = prefix.readUInt8(4);
  if (schema !== SCHEMA) throw new WireError("wire.schema", `schema ${schema}, this process speaks ${SCHEMA}`);
  const kind = prefix.readUInt8(5);
  if (kind >= KINDS || prefix.readUInt16LE(6) !== payloads.length) throw new WireError("wire.prefix", "kind or frames");
  const bytes = payloads.reduce((sum, payload) => sum + payload.length, 0);
  if (prefix.readBigUInt64LE(16) !== BigInt(bytes)) throw new WireError("wire.size", `${bytes} payload bytes are there`);
  const check = xxh3([body, ...payloads]) ^ xxh3([prefix.subarray(0, CHECK_AT)]);
  if (prefix.readBigUInt64LE(CHECK_AT) !== check) throw new WireError("wire.checksum", "a damaged frame");
  return { header: headerOf(body), payloads, request: prefix.readBigUInt64LE(8), kind };
}

function headerOf(body) {
  let header;
  try {
    header = decoder.decode(body);
  } catch (error) {
    throw new WireError("wire.decode", error.message);
  }
  if (!Array.isArray(header) || typeof header[0] !== "number") throw new WireError("wire.decode", "no array with a tag");
  return header;
}

// Converts a message to an object with the given names; an omitted field is undefined. Fields beyond these names,
// which a newer sender may add, are ignored.
export function named(header, names) {
  const [tag, least] = TAGS[names.message];
  if (header[0] !== tag) throw new WireError("wire.unexpected", `tag ${header[0]}, not ${names.message}`);
  if (header.length - 1 < least) throw new WireError("wire.decode", `${names.message} has too few fields`);
  return Object.fromEntries(names.fields.map((name, place) => [name, header[place + 1]]));
}

const READ = {
  i4: [4, (view, at) => view.getInt32(at, true)],
  f4: [4, (view, at) => view.getFloat32(at, true)],
  u1: [1, (view, at) => view.getUint8(at)],
  i8: [8, (view, at) => view.getBigInt64(at, true)],
};

// The arrays of a payload by its fields [name, dtype, offset, count].
export function arraysOf(fields, payload) {
  const view = new DataView(payload.buffer, payload.byteOffset, payload.length);
  const found = {};
  for (const [name, dtype, offset, count] of fields) {
    if (!(dtype in READ)) throw new WireError("wire.decode", `dtype ${dtype}`);
    const [size, read] = READ[dtype];
    if (offset < 0 || count < 0 || offset + count * size > payload.length) {
      throw new WireError("wire.decode", `${name} leaves its payload`);
    }
    found[name] = Array.from({ length: count }, (_, index) => read(view, offset + index * size));
  }
  return found;
}
