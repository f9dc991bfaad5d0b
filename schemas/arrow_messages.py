"""Arrow IPC messages looked at before they are opened: what would be expanded is refused first.

A record batch may hold compressed buffers, and Arrow expands them while it reads: 90 kB can become 5 GB. Whether it does is written in the
message's metadata, a flatbuffer (https://arrow.apache.org/docs/format/Columnar.html#ipc-message-format, Message.fbs). Four numbers of it
are read here, each checked against the bytes that are there.

```text
metadata:  root table Message  = [version, header type, header, body length, ...]     header type 3 is a RecordBatch
           table RecordBatch   = [length, nodes, buffers, compression, ...]           `compression` is absent in plain batches
table:     int32 back to its vtable;  vtable: uint16 its size, uint16 the table's, then uint16 offset of each field in the table, 0: absent
```
"""

from __future__ import annotations

import struct

import pyarrow as pa

from streamrl.errors import SchemaError

_HEADER, _COMPRESSION = 2, 3
"""Numbers of these fields in the tables Message and RecordBatch."""


def read_plain_batch(message: pa.ipc.Message, schema: pa.Schema, *, place: str = "") -> pa.RecordBatch:
    """The record batch of an IPC message whose buffers are as long in memory as in the message; errors say `place`.

    Raises:
        SchemaError: another kind of message, compressed buffers, or metadata that does not add up.
        pyarrow.ArrowException: it is no batch of this schema.
    """
    if message.type != "record batch":
        raise SchemaError(f"expected one Arrow record batch after the schema{place}, got a {message.type}")
    try:
        compressed = _is_compressed(message.metadata.to_pybytes())
    except struct.error as error:
        raise SchemaError(f"expected the metadata of an Arrow message{place}, got bytes that are none: {error}") from error
    if compressed:
        raise SchemaError(
            f"expected Arrow buffers as they are{place}, got compressed ones",
            hint="write the stream without IpcWriteOptions(compression=...)",
        )
    return pa.ipc.read_record_batch(message, schema)


def _is_compressed(metadata: bytes) -> bool:
    """Raises struct.error where a place is not in `metadata`, as `_field` does."""
    (root,) = struct.unpack_from("<I", metadata, 0)
    header = _field(metadata, root, _HEADER)
    if header == 0:
        raise struct.error("a message without a header")
    (step,) = struct.unpack_from("<I", metadata, header)
    return _field(metadata, header + step, _COMPRESSION) != 0


def _field(data: bytes, table: int, number: int) -> int:
    """Place of a table's field in the flatbuffer; 0: it is absent. Raises struct.error where a place is not in `data`."""
    (back,) = struct.unpack_from("<i", data, table)
    vtable = table - back
    if vtable < 0:
        raise struct.error(f"a vtable at {vtable}")
    (size,) = struct.unpack_from("<H", data, vtable)
    entry = 4 + 2 * number
    if entry + 2 > size:
        return 0
    (offset,) = struct.unpack_from("<H", data, vtable + entry)
    return table + offset if offset else 0
