"""What runtime and driver say to each other. Every message is one JSON object a line: its `type`, then its fields."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


def _tag(class_name: str) -> str:
    return class_name[:1].lower() + class_name[1:]


class Value(msgspec.Struct, frozen=True, rename="camel"):
    """A part of messages."""


class Message(msgspec.Struct, frozen=True, rename="camel", tag=_tag):
    """One utterance on a session."""


class KeyRange(Value, frozen=True, order=True):
    """The key hashes of one split: 32 bits, both ends inclusive."""

    begin: int = 0
    end: int = 0xFFFFFFFF

    @property
    def text(self) -> str:
        return f"{self.begin:08x}-{self.end:08x}"

    def __contains__(self, key_hash: int) -> bool:
        return self.begin <= key_hash <= self.end

    def overlaps(self, other: KeyRange) -> bool:
        return self.begin <= other.end and other.begin <= self.end


ALL_KEYS = KeyRange()
START_TICK = -1


class RuntimeCheckpoint(Value, frozen=True):
    """Up to which tick a destination holds everything; opaque to drivers. The session counts the rounds.

    `seal` tells this tick from one of the same number that another state folder, or a copy of this one, has sealed.
    """

    tick: int
    position: str | None = None
    round: int = 0
    seal: str | None = None  # not known of what an earlier version has delivered


START = RuntimeCheckpoint(START_TICK)  # said explicitly by a destination that holds nothing yet


class StateUpdate(Value, frozen=True):
    """A change of the driver's state: the whole document, or an RFC 7396 patch of it."""

    updated: Any
    merge_patch: bool = True


class FieldSpec(Value, frozen=True):
    """A column: its name, its type as Spark's DDL writes a scalar, or `json` for anything nested."""

    name: str
    type: str
    nullable: bool = True


class BindingSpec(Value, frozen=True):
    """One collection and the resource (a table, a topic) that it is materialized into."""

    collection: str
    resource: dict[str, Any]
    key: tuple[FieldSpec, ...]
    values: tuple[FieldSpec, ...]
    delta_updates: bool = False

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        return self.key + self.values


class MaterializationSpec(Value, frozen=True):
    """Everything a driver must know of a materialization; secrets in `config` are already resolved."""

    name: str
    bindings: tuple[BindingSpec, ...]
    config: dict[str, Any]


ConstraintKind = Literal["fieldRequired", "locationRequired", "fieldOptional", "fieldForbidden", "incompatible"]


class Constraint(Value, frozen=True):
    """What a driver says to one field."""

    kind: ConstraintKind
    reason: str = ""


class ValidatedBinding(Value, frozen=True):
    """A driver's opinion of one binding; a field that is not named is forbidden."""

    constraints: dict[str, Constraint]
    resource_path: tuple[str, ...]
    delta_updates: bool


class Spec(Message, frozen=True):
    """Runtime: who are you?"""


class Described(Message, frozen=True, tag="spec"):
    """Driver: JSON Schemas of the configuration and of a binding's resource, and where the documentation is."""

    config_schema: dict[str, Any]
    resource_schema: dict[str, Any]
    documentation: str


class Validate(Message, frozen=True):
    """Runtime: could you take this? Nothing is created."""

    materialization: MaterializationSpec
    last: MaterializationSpec | None = None


class Validated(Message, frozen=True):
    """Driver: one opinion a binding, in the bindings' order."""

    bindings: tuple[ValidatedBinding, ...]


class Apply(Message, frozen=True):
    """Runtime: create or alter what you need; may be repeated."""

    materialization: MaterializationSpec
    version: str
    last: MaterializationSpec | None = None
    state: Any = None


class Applied(Message, frozen=True):
    """Driver: what was done; with state: call me again."""

    action_description: str
    state: StateUpdate | None = None


class Open(Message, frozen=True):
    """Runtime: take the fence of this range, and tell your checkpoint if you keep it."""

    materialization: MaterializationSpec
    version: str
    key_range: KeyRange = ALL_KEYS
    state: Any = None


class Opened(Message, frozen=True):
    """Driver: ready. No checkpoint: the recovery log's counts; `START`: this destination holds nothing yet."""

    runtime_checkpoint: RuntimeCheckpoint | None = None


class Acknowledge(Message, frozen=True):
    """Runtime: the last StartCommit is durable in the recovery log; put staged work in place."""

    state: Any = None


class Acknowledged(Message, frozen=True):
    """Driver: everything of the last round is in place."""

    state: StateUpdate | None = None


class Load(Message, frozen=True, gc=False):
    """Runtime: which document has this key? At most once a round."""

    binding: int
    key: tuple[Any, ...]


class Loaded(Message, frozen=True, gc=False):
    """Driver: a document that exists, as JSON."""

    binding: int
    doc: bytes


class Flush(Message, frozen=True):
    """Runtime: answer all loads now."""


class Flushed(Message, frozen=True):
    """Driver: every document that exists has been sent."""

    state: StateUpdate | None = None


class Store(Message, frozen=True, gc=False):
    """Runtime: this key has this document now, or none. Keys and values are in cell form; at most once a key."""

    binding: int
    key: tuple[Any, ...]
    values: tuple[Any, ...]
    doc: bytes = b"null"
    exists: bool = False
    delete: bool = False


class StartCommit(Message, frozen=True):
    """Runtime: that was all; commit up to here."""

    runtime_checkpoint: RuntimeCheckpoint


class StartedCommit(Message, frozen=True):
    """Driver: the commit is done (destination authoritative), or what it takes to finish it is in `state`."""

    state: StateUpdate | None = None


Request = Spec | Validate | Apply | Open | Acknowledge | Load | Flush | Store | StartCommit
Response = Described | Validated | Applied | Opened | Acknowledged | Loaded | Flushed | StartedCommit


class _StoreLine(Store, frozen=True, gc=False, tag="store"):
    doc: msgspec.Raw = msgspec.Raw(b"null")


class _LoadedLine(Loaded, frozen=True, gc=False, tag="loaded"):
    doc: msgspec.Raw


_encode = msgspec.json.Encoder(decimal_format="number").encode
_requests = msgspec.json.Decoder(Spec | Validate | Apply | Open | Acknowledge | Load | Flush | _StoreLine | StartCommit)
_responses = msgspec.json.Decoder(
    Described | Validated | Applied | Opened | Acknowledged | _LoadedLine | Flushed | StartedCommit
)


def encode_line(message: Request | Response) -> bytes:
    """One line without its end; a document stands in it as JSON, not as text."""
    if isinstance(message, Store | Loaded):
        message = msgspec.structs.replace(message, doc=msgspec.Raw(message.doc))
    return _encode(message)


def decode_request(line: bytes) -> Request:
    message: Request = _requests.decode(line)
    if isinstance(message, _StoreLine):
        return Store(**{**msgspec.structs.asdict(message), "doc": bytes(message.doc)})
    return message


def decode_response(line: bytes) -> Response:
    message: Response = _responses.decode(line)
    return Loaded(message.binding, bytes(message.doc)) if isinstance(message, _LoadedLine) else message
