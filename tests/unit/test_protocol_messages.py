"""Messages are lines of JSON, and come back as they were."""

from __future__ import annotations

import pytest

from tidegate.protocol.messages import (
    ALL_KEYS,
    Apply,
    BindingSpec,
    FieldSpec,
    Flushed,
    KeyRange,
    Load,
    Loaded,
    MaterializationSpec,
    Open,
    Opened,
    Request,
    Response,
    RuntimeCheckpoint,
    StartCommit,
    StateUpdate,
    Store,
    decode_request,
    decode_response,
    encode_line,
)

KEY = (FieldSpec("id", "bigint", nullable=False),)
SPEC = MaterializationSpec("m", (BindingSpec("orders", {"table": "o"}, KEY, (FieldSpec("x", "json"),)),), {"path": "p"})


@pytest.mark.parametrize(
    "message",
    [
        Apply(SPEC, "1", SPEC, {"a": 1}),
        Open(SPEC, "1", KeyRange(5, 9)),
        Load(0, (1, "x")),
        Store(0, (1,), ("[1]", None), b'{"id":1,"x":[1]}', exists=True),
        StartCommit(RuntimeCheckpoint(7, "0/1A", 3)),
    ],
)
def test_a_request_survives_the_wire(message: Request) -> None:
    assert decode_request(encode_line(message)) == message


@pytest.mark.parametrize(
    "message", [Opened(), Opened(RuntimeCheckpoint(3)), Loaded(0, b'{"a":1}'), Flushed(StateUpdate({"a": None}))]
)
def test_a_response_survives_the_wire(message: Response) -> None:
    assert decode_response(encode_line(message)) == message


def test_names_on_the_wire_are_camel_case_and_documents_are_json() -> None:
    assert encode_line(StartCommit(RuntimeCheckpoint(1))).startswith(b'{"type":"startCommit","runtimeCheckpoint":')
    assert b'"doc":{"a":1}' in encode_line(Loaded(0, b'{"a":1}'))


def test_a_message_is_one_line() -> None:
    assert b"\n" not in encode_line(Store(0, ("a\nb",), ()))


def test_a_key_range_has_a_name() -> None:
    assert ALL_KEYS.text == "00000000-ffffffff"
    assert 0 in ALL_KEYS and 0xFFFFFFFF in ALL_KEYS and 10 not in KeyRange(5, 9)
