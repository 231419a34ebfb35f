"""Requests about images: producers store them, reward workers and the learner fetch them.

Guarantees:
1. only bytes that match their digest, and that `check_image` accepts, get into the run folder; a message with another
   image stores nothing;
2. an answer has at most `PIECE_BYTES` of images, or one image.
"""

from __future__ import annotations

from asyncrl import wire
from asyncrl.errors import WireError, error_for
from asyncrl.images.decoding import ImageProblem, check_image
from asyncrl.images.digests import image_digest
from asyncrl.images.folder import ImageFolder
from asyncrl.net.keys import is_guest
from asyncrl.net.responder import Call
from asyncrl.runtime.run_dir import RunDir
from buffers.service.context import Context

PIECE_BYTES = 16 << 20


class ImageRequests:
    """The images of the run, in its folder."""

    def __init__(self, context: Context) -> None:
        self.context = context
        durable = context.config.buffer.fsync == "always"
        self._folder = ImageFolder(RunDir(context.config.run_dir).images, durable=durable)

    def store(self, call: Call) -> None:
        """A `StoreImages`."""
        ask: wire.StoreImages = call.message
        if len(ask.digests) != len(call.payloads):
            raise WireError("wire.decode", f"{len(ask.digests)} images with {len(call.payloads)} payload frames")
        images = [bytes(payload) for payload in call.payloads]
        try:
            for digest, data in zip(ask.digests, images, strict=True):
                if image_digest(data) != digest:
                    raise ImageProblem("the bytes do not match their digest")
                check_image(data)
        except ImageProblem as problem:
            if is_guest(call.holder):
                self.context.peers.pause("producer", ask.producer, self.context.now)
            raise error_for("image.invalid", problem.reason, where=ask.producer) from None
        for data in images:
            self._folder.put(data)
            self.context.counters["image_bytes"] += len(data)
        self.context.answer(call, wire.Ok())

    def fetch(self, call: Call) -> None:
        """A `FetchImages`."""
        limit = min(PIECE_BYTES, self.context.config.network.max_message_bytes // 2)
        found: dict[str, bytes] = {}
        missing: dict[str, str] = {}
        for digest in call.message.digests:
            try:
                data = self._folder.get(digest)
            except ImageProblem as problem:
                missing[digest] = problem.reason
                continue
            if found and sum(map(len, found.values())) + len(data) > limit:
                break
            found[digest] = data
        self.context.answer(call, wire.Images(tuple(found), missing), list(found.values()))
