// Client of one service over a DEALER socket. It repeats a request until an answer arrives or its deadline passes.
// Services are idempotent, so repeated requests are safe. The number of a request identifies its answer.
import { readFileSync } from "node:fs";
import { Dealer } from "zeromq";
import { REPLY, TAGS, WireError, decode, encode } from "./wire.mjs";

const RESEND_MS = 3000;
const DAMAGED = new Set(["wire.prefix", "wire.schema", "wire.size", "wire.checksum"]);
const BELIEVED = 3; // accept the refusal of a damaged request after this many

export class Refused extends Error {
  constructor([, code, message, where]) {
    super(`${code}: ${message}${where ? ` (${where})` : ""}`);
    this.code = code;
  }
}

// Socket options for the run's key file (network.key_file); none without a key file.
export function curve(path) {
  if (!path) return {};
  const keys = JSON.parse(readFileSync(path, "utf8"));
  return { curveServerKey: keys.server_public, curvePublicKey: keys.client_public, curveSecretKey: keys.client_secret };
}

export class Client {
  constructor(address, { keyFile = "", timeoutMs = 60_000, maxBytes = 256 << 20 } = {}) {
    this.address = address;
    this.timeoutMs = timeoutMs;
    this.number = 0n;
    this.waiting = new Map();
    this.sending = Promise.resolve();
    this.socket = new Dealer({ linger: 2000, maxMessageSize: maxBytes, immediate: true, ...curve(keyFile) });
    this.socket.connect(address);
    this.reading = this.read();
  }

  async read() {
    try {
      for await (const frames of this.socket) this.take(frames);
    } catch (error) {
      if (!this.socket.closed) throw error;
    }
  }

  take(frames) {
    let packet;
    try {
      packet = decode(frames);
    } catch (error) {
      if (error instanceof WireError) return; // damaged in transit: the request is repeated
      throw error;
    }
    const asked = this.waiting.get(packet.request);
    if (asked === undefined || packet.kind !== REPLY) return; // second answer to a repeated request
    const refused = packet.header[0] === TAGS.Refused[0];
    if (refused && DAMAGED.has(packet.header[1]) && ++asked.refusals < BELIEVED) asked.send();
    else if (refused) asked.reject(new Refused(packet.header));
    else asked.resolve(packet);
  }

  // Returns the answer to a message. `waitMs` is the longest time that the service may delay it.
  async ask(header, { waitMs = 0 } = {}) {
    const request = ++this.number;
    const frames = encode(header, { request });
    let timer, deadline;
    try {
      return await new Promise((resolve, reject) => {
        const send = () => {
          this.sending = this.sending.then(() => this.socket.send(frames)).catch(() => {}); // one at a time
        };
        this.waiting.set(request, { resolve, reject, send, refusals: 0 });
        timer = setInterval(send, waitMs + RESEND_MS);
        const limit = this.timeoutMs + waitMs;
        deadline = setTimeout(() => reject(new Error(`${this.address}: no answer within ${limit} ms`)), limit);
        send();
      });
    } finally {
      clearInterval(timer);
      clearTimeout(deadline);
      this.waiting.delete(request);
    }
  }

  close() {
    this.socket.close();
  }
}
