"""Templates of self-contained HTML pages: they load nothing, run only their own script, and show names as text."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup, escape

_COMMAND = re.compile(r"`([^`]+)`")
_FLAG = re.compile(r"(?<!\S)(--[a-z][a-z0-9-]*)")


def render_page(template: str, **values: Any) -> str:
    """Render a page, with every text escaped; equal values give equal text.

    `template` is Jinja source, which may import macros.html; it also gets `policy`, `style` and `script`, and the
    filter `format_commands`.
    """
    style, script = own_file(__package__, "page.css"), own_file(__package__, "page.js")
    policy = f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}"
    return _template(template).render(
        policy=f"{policy}; base-uri 'none'; form-action 'none'",
        style=Markup(style),  # a file of this package
        script=Markup(script),
        **values,
    )


def format_commands(text: str) -> Markup:
    """Escape a sentence, with commands in backticks and flags as code."""
    marked = _COMMAND.sub(r"<code>\1</code>", str(escape(text)))
    return Markup(_FLAG.sub(r'<span class="flag">\1</span>', marked))  # it is escaped above


@cache
def own_file(package: str, name: str) -> str:
    """Return the text of a file in a package."""
    return (resources.files(package) / name).read_text("utf-8")


@cache
def _template(text: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: own_file(__package__, name)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["format_commands"] = format_commands
    return environment.from_string(text)


def _digest(text: str) -> str:
    """Return a source of a content security policy that allows only this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
