"""The common look of all HTML pages: template, style, and formatting of numbers, names and pictures."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from PIL.Image import Image

from zerovision.training.base import units

TEMPLATE = Path(__file__).resolve().parent / "template"
THIN = "\u202f"  # narrow no-break space, between a number and its unit
LONGEST_NAME = 80


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with `digits` significant digits, separating thousands by thin spaces; '–' for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "not finite"
    if value and not 1e-3 <= abs(value) < 1e7:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    power = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{max(digits - 1 - power, 0)}f}".replace(",", THIN)


def plain(value: float) -> str:
    """Format a round number without trailing zeros."""
    return f"{value:.10g}" if 1e-4 <= abs(value) < 1e6 or not value else number(value, 3)


def percent(share: float | None, decimals: int = 1) -> str:
    """Format a share in 0..1 as a percentage; '–' for None."""
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.{decimals}f}{THIN}%"


def count(value: int) -> str:
    """Format an integer, separating thousands by thin spaces."""
    return f"{value:,}".replace(",", THIN)


def date_and_time(unix_seconds: float) -> str:
    """Format a Unix time in the local time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))


def plural(value: int, noun: str) -> str:
    """Format a count and its noun like `zerovision.training.base.units.plural`, with thin spaces between thousands."""
    return units.plural(value, noun).replace(",", THIN)


def clip(text: str, longest: int = LONGEST_NAME) -> str:
    """Shorten text that is too long for a table."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def clip_middle(text: str, longest: int = LONGEST_NAME) -> str:
    """Shorten a file name in the middle to keep its extension."""
    kept = longest - 1
    return text if len(text) <= longest else f"{text[: kept // 2]}…{text[-(kept - kept // 2) :]}"


def join(names: Sequence[str]) -> str:
    """Join names: a; a and b; a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def isolate(text: str) -> str:
    """Return a name, isolated so that right-to-left text in it does not reorder the sentence around it."""
    return text if text.isascii() else f"\u2068{text}\u2069"


def data_uri(image: bytes | Image, kind: str, **options: Any) -> str:
    """Return an image as a data URI.

    Bytes must be the contents of a file of type `kind`, such as "png"; an image is encoded as `kind` with Pillow's
    `options`.
    """
    if isinstance(image, bytes):
        content = image
    else:
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        content = stream.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def render(page: Path, script: Path | None = None, **values: Any) -> str:
    """Render a template that extends base.html, with the common style and no scripts other than `script`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([TEMPLATE, page.parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"clip": clip, "clip_middle": clip_middle, "count": count, "percent": percent}
    code = "" if script is None else script.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return environment.get_template(page.name).render(
        **values,
        style=Markup((TEMPLATE / "style.css").read_text(encoding="utf-8")),
        script=Markup(code),
        script_source=Markup(f"'sha256-{digest}'" if code else "'none'"),
    )
