"""How the processors of multimodal models cut images into patches, tiles and tokens, and sounds into frames.

Read in transformers 5.24: image_processing_qwen2_vl.py `smart_resize` (Qwen2-VL to Qwen 3.6, with the bounds
of each), image_processing_glm4v.py (the same, of an image taken as two frames),
image_processing_kimi_k25.py `navit_resize`, image_processing_gemma4.py `get_aspect_ratio_preserving_size`,
image_processing_got_ocr2.py `get_optimal_tiled_canvas` (InternVL), image_processing_lfm2_vl.py
`resize_and_split`, image_processing_llama4.py `get_best_fit`, processing_gemma3.py,
image_processing_idefics3.py `resize_for_vision_encoder` (and SmolVLM's), image_processing_minimax_m3_vl.py,
image_processing_llava.py, image_processing_step3p7.py `_plan_patches`, and of LLaVA-NeXT and LLaVA-OneVision
`select_best_resolution` (image_processing_utils.py) and their processors' `_get_unpadded_features`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from math import ceil, floor, sqrt
from typing import Any, Literal

from zsim.errors import InputError
from zsim.specs.strategy.images import ImageSize, average_size

Tiling = Literal["none", "nearest aspect", "largest scale", "longer side", "filled"]
Resizing = Literal["nearest", "never up", "fills"]
_MAX_ASPECT = 200
_FRAMES_PER_SECOND = 100


@dataclass(frozen=True, slots=True)
class SoundRule:
    """How a model's processor and tower cut sounds, of frames of 10 ms.

    Read in transformers 5.24: processing_qwen2_audio.py (padded to 30 s), processing_voxtral.py,
    processing_audioflamingo3.py, and `get_audio_cu_seqlens` of modeling_qwen2_5_omni.py and
    modeling_qwen3_omni_moe.py.
    """

    piece: int
    """Frames of the pieces that convolutions see."""
    merge: int = 2
    """Rows of the tower that become one token."""
    halvings: int = 1
    """Convolutions that halve the frames."""
    window: int = 0
    """Rows that see each other. 0 for those of a piece where it is padded."""
    padded: bool = False
    """The last piece is filled up, and pieces do not see each other."""
    counts_padding: bool = False
    """Rows of padding become tokens too."""
    max_pieces: int = 0
    """Longer sounds are cut. 0 for sounds of any length."""

    @property
    def bounds(self) -> tuple[str, ...]:
        """The bounds that users may set."""
        return ()

    def rows_of(self, frames: int) -> int:
        """Rows of the tower of one piece."""
        for _ in range(self.halvings):
            frames = (frames + 1) // 2
        return frames

    def size_of(self, seconds: float) -> ImageSize:
        """A sound of so many seconds, as the tower sees it."""
        frames = max(1, floor(seconds * _FRAMES_PER_SECOND + 1e-6))
        if self.max_pieces:
            frames = min(frames, self.max_pieces * self.piece)
        full, rest = divmod(frames, self.piece)
        rows = full * self.rows_of(self.piece) + self.rows_of(rest)
        pieces, padded = full + (rest > 0), self.rows_of(self.piece)
        tokens = (pieces * padded if self.counts_padding else rows) // self.merge
        if self.padded:
            return ImageSize(pieces, padded, tokens)
        return ImageSize(1, rows, tokens, min(self.window, rows))

    @property
    def shortest(self) -> float:
        """Seconds of the shortest sound that has a token."""
        frames = next(frames for frames in count(1) if self.size_of(frames / _FRAMES_PER_SECOND).tokens)
        return frames / _FRAMES_PER_SECOND

    @property
    def smallest(self) -> ImageSize:
        """The sound that trainers give the tower where a micro-batch has none: 128 frames (ms-swift 3.9
        llm/template/template/qwen.py).
        """
        return self.size_of(128 / _FRAMES_PER_SECOND)


@dataclass(frozen=True, slots=True)
class ImageRule:
    """The rule of one model. Without a `tile` images keep their size, rounded to whole tokens."""

    patch: int
    """Pixels on a patch's side."""
    merge: int
    """Patches on the side of the square that becomes one token."""
    min_pixels: int = 0
    max_pixels: int = 0
    """Bounds of the area that images are scaled into."""
    window: int = 0
    """Pixels on the side of a window, in layers with windows."""
    tile: int = 0
    """Pixels on the side of a tile, all of which have equal size."""
    max_tiles: int = 1
    min_tiles: int = 1
    """The fewest tiles of images with more than twice `max_pixels`, beside which stands the whole image as
    scaled between the bounds. Smaller ones are that alone, on the rows of a tile. 1 without this rule.
    """
    tiling: Tiling = "none"
    """The grid of tiles has the nearest aspect ratio, or the largest scale that fits the image, or
    `max_tiles` on the longer side and as few as hold the image on the other. Or it has `max_tiles` always,
    whose rows see one another and are filled up to a multiple of 8 in each.
    """
    class_tokens: int = 0
    """Rows of the tower in each tile besides patches."""
    resizing: Resizing = "nearest"
    """Sides are rounded to whole tokens, or scaled down alone and padded to whole tokens, or scaled so that
    the image fills `max_pixels`. In the last case the tower always has rows for so many.
    """
    max_side: int = 0
    """Pixels that a side has at most. 0 without such a bound."""
    crop: int = 0
    """Pixels on the side of the crops that larger images are seen in besides the `tile` of all of it."""

    canvases: tuple[tuple[int, int], ...] = ()
    """Heights and widths in pixels of what tiles may cover, with one of the whole image. Padding is no token,
    and each row of patches ends with a token.
    """
    max_area: int = 0
    """Tiles whose patches become tokens at most, to which more are scaled down. 0 for all."""

    @property
    def bounds(self) -> tuple[str, ...]:
        """The bounds that users may set."""
        if self.tiling != "none":
            return ("max_tiles",)
        if self.tile:
            return ()
        return ("min_pixels", "max_pixels") if self.resizing == "nearest" else ("max_pixels",)

    @property
    def factor(self) -> int:
        """Pixels on the side of a token."""
        return self.patch * self.merge

    def size_of(self, width: int, height: int) -> ImageSize:
        """An image of `width` x `height` pixels, as the tower sees it.

        Raises InputError for an image more than 200 times as long as wide, which the processors refuse.
        """
        if max(width, height) > _MAX_ASPECT * min(width, height):
            raise InputError(
                f"training.images: found {width:,} x {height:,} pixels, which image processors refuse; "
                f"expected at most {_MAX_ASPECT} times as long as wide"
            )
        if self.crop:
            return self._with_crops(width, height)
        if self.canvases:
            return self._canvas_size(width, height)
        if self.tile:
            patches = (self.tile // self.patch) ** 2
            if self.min_tiles > 1:
                return self._whole_and_tiles(width, height, patches)
            if self.tiling == "filled":
                rows = patches + self.class_tokens
                return ImageSize(1, self.max_tiles * ceil(rows / 8) * 8, self.max_tiles * rows)
            tiles = self._tiles(width, height)
            return ImageSize(tiles, patches + self.class_tokens, tiles * (self.tile // self.factor) ** 2)
        if self.resizing == "fills":
            width, height = self._fill(width, height)
            return ImageSize(1, self.max_pixels // self.patch**2, width * height // self.factor**2)
        resize = self._resize if self.resizing == "nearest" else self._shrink
        width, height = resize(width, height)
        patches = (width // self.patch) * (height // self.patch)
        window = (self.window // self.factor * self.merge) ** 2 if self.window else 0
        return ImageSize(1, patches, patches // self.merge**2, min(window, patches))

    def set_bounds(self, **bounds: Any) -> ImageRule:
        """The rule with other bounds of pixels or of tiles. A lower bound above the upper one moves it
        too.
        """
        rule = replace(self, **bounds)
        if rule.min_pixels <= rule.max_pixels:
            return rule
        bound = rule.max_pixels if "max_pixels" in bounds else rule.min_pixels
        return replace(rule, min_pixels=bound, max_pixels=bound)

    @property
    def smallest(self) -> ImageSize:
        """The smallest image, as trainers give the tower one where a micro-batch has none."""
        side = self.tile or self.factor
        if self.resizing == "fills":
            return self.size_of(side, side)
        return replace(self, min_pixels=0, max_pixels=side * side).size_of(side, side)

    def _resize(self, width: int, height: int) -> tuple[int, int]:
        """Sides in whole tokens, with an area between the bounds."""
        factor, area = self.factor, width * height
        resized = [max(factor, round(side / factor) * factor) for side in (width, height)]
        if resized[0] * resized[1] > self.max_pixels:
            scale = sqrt(area / self.max_pixels)
            resized = [max(factor, floor(side / scale / factor) * factor) for side in (width, height)]
        elif resized[0] * resized[1] < self.min_pixels:
            scale = sqrt(self.min_pixels / area)
            resized = [ceil(side * scale / factor) * factor for side in (width, height)]
        return resized[0], resized[1]

    def _shrink(self, width: int, height: int) -> tuple[int, int]:
        """Sides scaled down to the bounds, and padded to whole tokens."""
        patches = max(1, width // self.patch) * max(1, height // self.patch)
        scale = min(1.0, sqrt(self.max_pixels // self.patch**2 / patches))
        if self.max_side:
            scale = min(scale, self.max_side / width, self.max_side / height)
        factor = self.factor
        resized = [ceil(max(1, int(side * scale)) / factor) * factor for side in (width, height)]
        return resized[0], resized[1]

    def _fill(self, width: int, height: int) -> tuple[int, int]:
        """Sides in whole tokens with the largest area that is not above `max_pixels`."""
        factor, scale = self.factor, sqrt(self.max_pixels / (width * height))
        resized = [floor(side * scale / factor) * factor for side in (width, height)]
        if 0 not in resized:
            return resized[0], resized[1]
        longest = self.max_pixels // factor**2
        tokens = min(max(width, height) // min(width, height), longest)
        return (factor, tokens * factor) if width < height else (tokens * factor, factor)

    def _with_crops(self, width: int, height: int) -> ImageSize:
        """The whole image on one tile and its crops, whose window is the shorter side of a long image."""
        views = [
            ImageSize(1, (side // self.patch) ** 2, (side // self.factor) ** 2)
            for side in (self.tile, self.crop)
        ]
        if min(width, height) < 32 and max(width, height) > 4 * min(width, height):
            width = height = max(width, height)
        scale = min(1.0, self.max_side / max(width, height))
        width, height = int(width * scale), int(height * scale)
        longer, shorter = max(width, height), min(width, height)
        window = self.crop if longer <= 4 * shorter else min(shorter, self.crop)
        if longer <= self.tile:
            window = shorter if longer > 1.5 * shorter else 0
        crops = 1 if window else 0
        for side in (width, height) if window else ():
            crops *= max(1, side // window + (side >= window and side % window > 0.2 * window))
        mean = average_size(views, (1, crops))
        return ImageSize(mean.tiles * (1 + crops), mean.patches, mean.tokens * (1 + crops))

    def _canvas_size(self, width: int, height: int) -> ImageSize:
        """On the canvas that keeps the most pixels, of several with the least padding."""

        def kept_pixels(canvas: tuple[int, int]) -> tuple[int, int]:
            scale = min(canvas[1] / width, canvas[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - canvas[0] * canvas[1]

        best, side = max(self.canvases, key=kept_pixels), self.tile // self.factor
        rows, columns = (length // self.tile * side for length in best)
        tiles, patches = 1 + rows * columns // side**2, (self.tile // self.patch) ** 2 + self.class_tokens
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        ratio = sqrt(rows * columns / (self.max_area * side**2)) if self.max_area else 0.0
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return ImageSize(tiles, patches, side**2 + rows * (columns + 1))

    def _whole_and_tiles(self, width: int, height: int, patches: int) -> ImageSize:
        columns, rows = (round(side / self.factor) or 0.5 for side in (width, height))
        resized = self._resize(width, height)
        tokens, tiles = resized[0] * resized[1] // self.factor**2, 1
        if columns * rows * self.factor**2 > 2 * self.max_pixels:
            tiles = self._tiles(width, height)
        return ImageSize(tiles, patches, tokens + (tiles - 1) * (self.tile // self.factor) ** 2)

    def _tiles(self, width: int, height: int) -> int:
        """Tiles of an image, and one of the whole image where there are several."""
        if self.tiling == "none":
            return 1
        if self.tiling == "longer side":
            longer, shorter = max(width, height), min(width, height)
            tiles = self.max_tiles * ceil(self.max_tiles * shorter / longer)
            return tiles + (tiles > 1)
        grids = [
            (columns, rows)
            for columns in range(1, self.max_tiles + 1)
            for rows in range(1, self.max_tiles // columns + 1)
            if columns * rows >= self.min_tiles
        ]
        choose = _nearest_aspect if self.tiling == "nearest aspect" else _largest_scale
        columns, rows = choose(grids, width, height, self.tile)
        tiles = columns * rows
        return tiles + 1 if tiles > 1 else 1


def _nearest_aspect(grids: list[tuple[int, int]], width: int, height: int, tile: int) -> tuple[int, int]:
    """The grid whose aspect ratio is nearest. Of equally near ones, in order of tiles, a larger one takes its
    place while the image has more than half of its area.
    """
    best, best_distance = (1, 1), float("inf")
    for grid in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - grid[0] / grid[1])
        is_tied = distance == best_distance and width * height > 0.5 * tile * tile * grid[0] * grid[1]
        if distance < best_distance or is_tied:
            best, best_distance = grid, distance
    return best


def _largest_scale(grids: list[tuple[int, int]], width: int, height: int, tile: int) -> tuple[int, int]:
    """The grid that the image is scaled up to the least, else scaled down to the least. Of several the one
    with the fewest tiles.
    """
    scales = {grid: min(tile * grid[0] / width, tile * grid[1] / height) for grid in grids}
    enlarging = [scale for scale in scales.values() if scale >= 1]
    chosen = min(enlarging) if enlarging else max(scales.values())
    return min((grid for grid in grids if scales[grid] == chosen), key=lambda grid: grid[0] * grid[1])
