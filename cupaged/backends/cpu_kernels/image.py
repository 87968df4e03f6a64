"""Link one relocatable ELF object (x86-64) into an image: bytes that run wherever they are mapped, without a loader.

    bytes 0 .. 63     the header: MAGIC, then the image's size and the entry's place, each int64
    from byte 64 on   the object's code and constants, each section at its alignment

Everything refers to everything else relative to itself, so nothing is left to be done when a file of such an image is
mapped. An object that needs more, a symbol of another library say, is refused. (ELF-64 object file format; System V ABI,
AMD64 supplement, 4.4.)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cupaged.backends.cpu_code import HEADER, HEADER_BYTES, MAGIC

_ALLOCATED, _WRITABLE = 0x2, 0x1
_SYMBOLS, _RELOCATIONS, _NO_BITS = 2, 4, 8
_RELATIVE = {2: "<i", 4: "<i", 24: "<q"}
"""R_X86_64_PC32, PLT32 and PC64: the distance from the place itself, and how it is stored."""
_HIGHEST_ALIGNMENT = 4096


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    flags: int
    data: memoryview
    link: int
    info: int
    alignment: int
    entry_bytes: int


class LinkError(ValueError):
    """An object that cannot become an image."""


def link(code: bytes, entry: str) -> bytes:
    """The image of an object; `entry` is the function whose place the header tells. Raises LinkError."""
    sections = _sections(code)
    places, size = _lay_out(sections)
    image = bytearray(size)
    for i, place in places.items():
        data = sections[i].data
        image[place : place + len(data)] = data
    (table,) = (section for section in sections if section.kind == _SYMBOLS)
    symbols = _Symbols(table, sections[table.link].data, places)
    for section in sections:
        if section.kind == _RELOCATIONS and section.info in places:
            _relocate(image, section, places[section.info], symbols)
    image[:HEADER_BYTES] = HEADER.pack(MAGIC, size, symbols.named(entry)).ljust(HEADER_BYTES, b"\0")
    return bytes(image)


def _sections(code: bytes) -> list[_Section]:
    if code[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<HH", code, 16) != (1, 62):
        raise LinkError("not a relocatable object for x86-64")
    (at,), (entry_bytes, count, names_index) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<HHH", code, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, at + i * entry_bytes) for i in range(count)]
    names = code[headers[names_index][4] :]
    whole = memoryview(code)
    return [
        _Section(
            name=names[name : names.index(b"\0", name)].decode(), kind=kind, flags=flags, link=linked, info=info, alignment=max(1, alignment), entry_bytes=width,
            data=memoryview(bytes(size)) if kind == _NO_BITS else whole[offset : offset + size],
        )
        for name, kind, flags, _, offset, size, linked, info, alignment, width in headers
    ]  # fmt: skip


def _lay_out(sections: list[_Section]) -> tuple[dict[int, int], int]:
    """Where each section that is needed at work begins, and where all end. What unwinds a stack is not needed."""
    places, end = {}, HEADER_BYTES
    for i, section in enumerate(sections):
        if section.flags & _ALLOCATED and section.name != ".eh_frame" and len(section.data):
            if section.flags & _WRITABLE or section.alignment > _HIGHEST_ALIGNMENT:
                raise LinkError(f"section {section.name} cannot be mapped as it lies")
            places[i] = -(-end // section.alignment) * section.alignment
            end = places[i] + len(section.data)
    return places, end


class _Symbols:
    """Where an object's symbols lie in the image."""

    def __init__(self, table: _Section, names: memoryview, places: dict[int, int]) -> None:
        self._entries = [
            struct.unpack_from("<IBBHQQ", table.data, at) for at in range(0, len(table.data), table.entry_bytes)
        ]
        self._names, self._places = bytes(names), places

    def place(self, index: int) -> int:
        _, _, _, section, value, _ = self._entries[index]
        if section not in self._places:
            raise LinkError(f"{self._name(index) or 'a symbol'} lies outside the object")
        return int(self._places[section] + value)

    def named(self, name: str) -> int:
        return self.place(next(i for i in range(len(self._entries)) if self._name(i) == name))

    def _name(self, index: int) -> str:
        start = self._entries[index][0]
        return self._names[start : self._names.index(b"\0", start)].decode()


def _relocate(image: bytearray, relocations: _Section, start: int, symbols: _Symbols) -> None:
    for at in range(0, len(relocations.data), relocations.entry_bytes):
        offset, info, addend = struct.unpack_from("<QQq", relocations.data, at)
        kind, place = info & 0xFFFFFFFF, start + offset
        if kind not in _RELATIVE:
            raise LinkError(f"a relocation of type {kind} depends on where the image is mapped")
        struct.pack_into(_RELATIVE[kind], image, place, symbols.place(info >> 32) + addend - place)
