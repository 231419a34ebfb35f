"""Every message that crosses a process, and the one boundary that decodes them.

One module per conversation: `session`, `work`, `rewards`, `training`, `weights`. `codec` encodes and decodes frames,
`arrays` payloads; `validation` checks the meaning of samples. New fields have defaults and go last; the golden bytes of
every message are in `tests/unit/golden_messages.json`.
"""

from asyncrl.wire.arrays import ALIGNMENT, pack_arrays, pack_parts, unpack_arrays
from asyncrl.wire.base import (
    DTYPES,
    LARGEST,
    SCHEMA,
    Buffer,
    Field,
    FloatArray,
    IntArray,
    Message,
    Name,
    Place,
    Version,
    Whole,
)
from asyncrl.wire.codec import (
    COPY_THRESHOLD_BYTES,
    MAGIC,
    MAX_HEADER_BYTES,
    PREFIX,
    REPLY,
    REQUEST,
    REQUEST_MANY,
    AnyMessage,
    Packet,
    decode,
    decode_header,
    decode_samples,
    encode,
    encode_header,
    peek_request,
)
from asyncrl.wire.rewards import RewardFailure, RewardItem, RewardRequest, RewardWork, Score, Scores, ScoresReply
from asyncrl.wire.session import (
    Heartbeat,
    Hello,
    Ok,
    Refused,
    Replies,
    StatusReply,
    StatusRequest,
    Stop,
    Tune,
    Tuned,
    Welcome,
)
from asyncrl.wire.training import (
    Batch,
    Checkpointed,
    Claim,
    Commit,
    EvaluationsReply,
    EvaluationsRequest,
    Goodbye,
    GroupHead,
    LedgerReply,
    LedgerRequest,
    NotYet,
    Quarantine,
    Register,
    Registered,
)
from asyncrl.wire.validation import checked_arrays, validate_samples
from asyncrl.wire.weights import (
    BaseOffer,
    Fetch,
    Fetched,
    Hop,
    Instruction,
    Manifest,
    MemberPoll,
    Publish,
    Published,
    RoundReply,
    RoundRequest,
    Tensor,
)
from asyncrl.wire.work import (
    Begun,
    Lease,
    LeaseRequest,
    LeaseReturn,
    Leases,
    Piece,
    Pieces,
    PiecesReply,
    SampleHead,
    Samples,
    SamplesAt,
    SamplesReply,
)
