"""Images by digest for the clients of the buffer: from memory, from the folder of the run, or from the service.

Guarantees:
1. a process on the service's host reads and writes the folder itself; elsewhere an image crosses the socket once, as
   long as it is among the newest `CACHE_BYTES`;
2. what arrives matches its digest and is an image (`check_image`), or there is a reason.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from asyncrl import wire
from asyncrl.errors import error_for
from asyncrl.images.decoding import ImageProblem, check_image
from asyncrl.images.digests import image_digest
from asyncrl.images.folder import ImageFolder
from asyncrl.runtime.run_dir import RunDir
from buffers.payloads.record_format import same_folder

CACHE_BYTES = 256 << 20
PIECE_BYTES = 16 << 20  # of images in one message, or one image
FRAMES_BYTES = 4096  # of a message with one image, without the image
MOST_ASKED = 256  # digests in one request
SLOWEST = 1 << 20  # bytes/s of a connection: nothing is sent again before it may have arrived
FETCH_S = 32.0  # for an answer with the largest image


def shared_folder(segments: str, nonce: str) -> ImageFolder | None:
    """The images of the run, if this process sees the folder that the service names."""
    folder = same_folder(segments, nonce)
    return None if folder is None else ImageFolder(RunDir(folder.parent).images)


def cut_pieces(images: Mapping[str, bytes], *, max_bytes: int) -> Iterator[dict[str, bytes]]:
    """The images in parts for one message each. Raises `image.invalid` for one that no message of `max_bytes` holds."""
    piece: dict[str, bytes] = {}
    limit = min(PIECE_BYTES, max_bytes // 2)
    for digest, data in images.items():
        if len(data) + FRAMES_BYTES > max_bytes:
            what = f"image: {len(data)} bytes, and network.max_message_bytes = {max_bytes}"
            raise error_for("image.invalid", what, where=digest[:8])
        if piece and sum(map(len, piece.values())) + len(data) > limit:
            yield piece
            piece = {}
        piece[digest] = data
    if piece:
        yield piece


class ImageReader:
    """The images that this process has seen, up to `CACHE_BYTES`; those of the current search are all held."""

    def __init__(self, folder: ImageFolder | None = None) -> None:
        self.folder = folder
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def search(self, digests: Iterable[str]) -> Search:
        """Look in memory and in the folder; the search says what to ask of the service."""
        found = Search(self)
        for digest in dict.fromkeys(digests):
            data = self._kept.get(digest)
            if data is not None:
                self._kept.move_to_end(digest)
                found.images[digest] = data
            elif self.folder is None or not found.take(digest, self._read(self.folder, digest)):
                found.wanted.append(digest)
        found.problems.clear()  # the service has the last word: a shared file system may lag behind
        return found

    @staticmethod
    def _read(folder: ImageFolder, digest: str) -> bytes:
        try:
            return folder.get(digest)
        except ImageProblem:
            return b""

    def keep(self, digest: str, data: bytes) -> None:
        """Remember an image, and forget the oldest above the limit."""
        self._kept[digest] = data
        self._bytes += len(data)
        while self._bytes > CACHE_BYTES and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[1])


class Search:
    """One search: `images` so far, `problems` (digest -> reason), and what is still `wanted` of the service."""

    def __init__(self, reader: ImageReader) -> None:
        self.images: dict[str, bytes] = {}
        self.problems: dict[str, str] = {}
        self.wanted: list[str] = []
        self._reader = reader

    def request(self) -> wire.FetchImages:
        """What to ask next."""
        return wire.FetchImages(tuple(self.wanted[:MOST_ASKED]))

    def take_answer(self, packet: wire.Packet) -> None:
        """An answer to `request`. One that brings nothing on ends the search."""
        answer: wire.Images = packet.message
        asked = set(self.wanted[:MOST_ASKED])
        settled = asked & {*answer.digests, *answer.missing}
        self.problems |= {digest: why for digest, why in answer.missing.items() if digest in asked}
        for digest, payload in zip(answer.digests, packet.payloads, strict=False):
            if digest in asked:
                self.take(digest, bytes(payload))
        for digest in asked if not settled else settled - self.images.keys() - self.problems.keys():
            self.problems[digest] = f"image: {digest[:8]} did not arrive"
        self.wanted = [digest for digest in self.wanted if digest not in self.images and digest not in self.problems]

    def take(self, digest: str, data: bytes) -> bool:
        """Whether these are the bytes of a good image; else there is a problem."""
        try:
            if image_digest(data) != digest:
                raise ImageProblem(f"{digest[:8]} is not what arrived")
            check_image(data)
        except ImageProblem as problem:
            self.problems[digest] = problem.reason
            return False
        self.images[digest] = data
        self._reader.keep(digest, data)
        return True
