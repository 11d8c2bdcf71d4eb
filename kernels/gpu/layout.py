"""How quantized weights lie on the device: tiles of 64 rows and 128 columns, made once at load.

A tile's codes are contiguous, so a program streams its rows of tiles with 128-bit loads, and they
stand where the kernels' instructions want them (``words.py`` takes them apart). Word i of a row:

- ``w4``: column 32 j + 2 i at bits 4 j, its right neighbour at bits 16 + 4 j (j < 4);
- ``lut``: column 32 j + 2 i + e at bits 8 j + 4 e;
- ``w8``: words 16 h + i: column 64 h + 32 j + 2 i + e in byte j + 2 e (h, j, e < 2).

Scales and minima of 64 rows lie side by side, row 16 b + 8 h + r at 16 b + 2 r + h: a thread of a
tensor core's result holds rows r and r + 8, and finds two 16-bit scales in one word. What is padded
has scale and minimum 0, hence weight 0. Nothing is rounded: each function has its inverse.
"""

import torch

from llmrun.kernels.gpu.arrays import TILE_K, TILE_N, padded


def tiles(codes: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """u8 [N, row bytes] padded and cut into tiles [Np / 64, Kp / 128, 64, ``row_bytes``]."""
    n, width = codes.shape
    rows, columns = padded(n, TILE_N), padded(width, row_bytes)
    if (rows, columns) != (n, width):
        whole = codes.new_zeros(rows, columns)
        whole[:n, :width] = codes
        codes = whole
    return codes.view(rows // TILE_N, TILE_N, columns // row_bytes, row_bytes).transpose(1, 2)


def untiled(tiled: torch.Tensor, n: int, width: int) -> torch.Tensor:
    """The inverse of ``tiles``."""
    n_tiles, k_tiles, rows, row_bytes = tiled.shape
    return tiled.transpose(1, 2).reshape(n_tiles * rows, k_tiles * row_bytes)[:n, :width]


def pack_w4(codes: torch.Tensor) -> torch.Tensor:
    """Codes u8 [N, K / 2] (low nibble: even column) as int32 tiles [Np / 64, Kp / 128, 64, 16]."""
    cut = tiles(codes, TILE_K // 2)
    shape = cut.shape[:3]
    octets = cut.reshape(*shape, 4, 16)  # byte 16 j + i holds columns 32 j + 2 i and the next
    low = torch.zeros(*shape, 16, dtype=torch.int16, device=codes.device)
    high = torch.zeros_like(low)
    for j in range(4):
        low |= (octets[..., j, :] & 15).to(torch.int16) << 4 * j
        high |= (octets[..., j, :] >> 4).to(torch.int16) << 4 * j
    return torch.stack((low, high), -1).view(torch.int32).squeeze(-1)


def unpack_w4(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The inverse of ``pack_w4``."""
    halves = packed.unsqueeze(-1).view(torch.int16)
    planes = [(halves >> 4 * j & 15).to(torch.uint8) for j in range(4)]
    octets = torch.stack([plane[..., 0] | plane[..., 1] << 4 for plane in planes], -2)
    return untiled(octets.flatten(-2), n, k // 2)


def pack_lut(codes: torch.Tensor) -> torch.Tensor:
    """Codes u8 [N, K / 2] as int32 tiles [Np / 64, Kp / 128, 64, 16]."""
    cut = tiles(codes, TILE_K // 2)
    octets = cut.reshape(*cut.shape[:3], 4, 16).transpose(-1, -2).contiguous()
    return octets.view(torch.int32).squeeze(-1)


def unpack_lut(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The inverse of ``pack_lut``."""
    octets = packed.unsqueeze(-1).view(torch.uint8).transpose(-1, -2)
    return untiled(octets.flatten(-2), n, k // 2)


def pack_w8(codes: torch.Tensor) -> torch.Tensor:
    """Codes u8 [N, K] as int32 tiles [Np / 64, Kp / 128, 64, 32]."""
    cut = tiles(codes, TILE_K)
    octets = cut.reshape(*cut.shape[:3], 2, 2, 16, 2)  # h, j, i, e
    turned = octets.permute(0, 1, 2, 3, 5, 6, 4).contiguous()  # h, i, e, j
    return turned.flatten(3).view(torch.int32)


def unpack_w8(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The inverse of ``pack_w8``."""
    octets = packed.view(torch.uint8).view(*packed.shape[:3], 2, 16, 2, 2)
    return untiled(octets.permute(0, 1, 2, 3, 6, 4, 5).flatten(3), n, k)


def pack_groups(values: torch.Tensor, columns: int) -> torch.Tensor:
    """Scales or minima [N, groups] as [Np / 64, ``columns``, 64], missing ones zero.

    One column stands for the whole row and is repeated.
    """
    n, groups = values.shape
    rows = padded(n, TILE_N)
    if groups == 1:
        values = values.expand(n, columns)
    if (rows, columns) != values.shape:
        whole = values.new_zeros(rows, columns)
        whole[:n, : values.shape[1]] = values
        values = whole
    blocks = values.reshape(rows // TILE_N, 4, 2, 8, columns)  # tile, b, h, r, group
    return blocks.permute(0, 4, 1, 3, 2).reshape(rows // TILE_N, columns, TILE_N)


def unpack_groups(packed: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    """The inverse of ``pack_groups``."""
    n_tiles, columns, _ = packed.shape
    blocks = packed.view(n_tiles, columns, 4, 8, 2).permute(0, 2, 4, 3, 1)
    return blocks.reshape(n_tiles * TILE_N, columns)[:n, :groups]


def table_words(table: torch.Tensor) -> torch.Tensor:
    """A table fp32 [16], followed by the bits of its bf16 values as ``words.lut`` takes them.

    fp32 [24]; the last eight hold four words of high bytes and four of low bytes.
    """
    octets = table.to(torch.bfloat16).view(torch.uint8).view(16, 2)
    words = torch.stack((octets[:, 1], octets[:, 0])).contiguous().view(torch.float32)
    return torch.cat((table, words.flatten()))
