"""Source text by its meaning, and the one digest of all code that makes a measurement.

A normalised text holds what a compiler or interpreter would see: comments and the amount of white
space between tokens do not count, while string literals, raw strings, the end of a preprocessor
line and white space that separates two tokens do. Two texts of one normalised digest compile to
the same code; two texts that compile to the same code may have two digests (a rebuild too many is
cheap, one too few is a lie). The rules are versioned: ``digest.RULES_VERSION``.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from routewise.digest import DigestCache, digest_of, sha256_bytes
from routewise.errors import RoutewiseError

#: A module-level tuple of this name lists files, relative to the module, that count as its code.
EXTRA_FILES_NAME = "MEASURES_WITH"

# ---------------------------------------------------------------------------------- C, C++, CUDA

C_SUFFIXES = frozenset({".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".hxx", ".inc", ".inl"})
C_SUFFIXES |= {".cu", ".cuh", ".m", ".mm", ".metal", ".cl", ".comp", ".glsl", ".wgsl"}
CMAKE_SUFFIXES = frozenset({".cmake"})

# Every branch begins with its own character, which lets the regex engine skip the rest fast. The
# apostrophe of a number (1'000) opens no character literal; `u8'a'` and `case'a'` do.
_C_LEXEME = re.compile(
    rb"""
      (?P<comment> //(?:[^\\\n]++|\\[\s\S])*+ | /\*[\s\S]*?\*/ )
    | (?P<raw> R"(?:(?<!\w\w")|(?<=\b[uUL]R")|(?<=\bu8R"))
               (?P<mark>[^()\\\s"]{0,16})\([\s\S]*?\)(?P=mark)" )
    | "(?:[^"\\\n]++|\\[\s\S])*+"
    | '(?:(?<![0-9a-fA-F]')|(?<=u8')|(?<=case'))(?:[^'\\\n]++|\\[\s\S])*+'
    """,
    re.VERBOSE,
)
_SPLICE = re.compile(rb"\\\r?\n")
_BLANKS = re.compile(rb"[ \t\r\f\v]+")
_DIRECTIVE = re.compile(rb"^ ?(#[^\n]*)$", re.MULTILINE)
# Stands where a literal was; the literals follow the code in their order.
_LITERAL = b"\x01"
# A space may go where its neighbours could not merge into one longer token: beside a bracket, a
# comma or a semicolon, between a word (or a literal) and punctuation, and between two punctuators
# that begin no operator together.
_FREE_SPACE = re.compile(
    rb"""
    [ ](?:
        (?<=[(){}\[\];,][ ]) | (?=[(){}\[\];,])
      | (?<=[\w\x01][ ])(?=[^\w.\x01]) | (?<=[^\w.\x01][ ])(?=[\w\x01])
      | (?<=[^\w\x01][ ])(?=[^\w\x01])
        (?! (?<=[-+*/%&|^<>=!][ ])= | (?<=\+[ ])\+ | (?<=-[ ])[->] | (?<=<[ ])[<:%] | (?<=>[ ])[>*]
          | (?<=&[ ])& | (?<=\|[ ])\| | (?<=:[ ])[:>] | (?<=%[ ])[>:] | (?<=\.[ ])[.*]
          | (?<=/[ ])[/*] | (?<=\*[ ])/ | (?<=\#[ ])\# | (?<=\?[ ]): )
    )
    """,
    re.VERBOSE,
)


def normalise_c(text: bytes) -> bytes:
    """Return C, C++ or CUDA source as its tokens: no comments, no idle white space.

    Line continuations are joined; each preprocessor line stays a line of its own, with the
    presence (not the amount) of its white space kept, since ``#define F(x)`` and
    ``#define F (x)`` are two macros. Literals are kept to the byte.
    """
    literals: list[bytes] = []

    def take(match: re.Match[bytes]) -> bytes:
        if match["comment"] is not None:
            return b" "
        literal = match[0]
        if match["raw"] is None:
            literal = _SPLICE.sub(b"", literal)
        literals.append(literal)
        return _LITERAL

    text = _C_LEXEME.sub(take, text.replace(_LITERAL, b"\\x01"))
    if b"\\" in text:
        text = _SPLICE.sub(b"", text)
    pieces = _DIRECTIVE.split(_BLANKS.sub(b" ", text))
    for index in range(0, len(pieces), 2):
        pieces[index] = _FREE_SPACE.sub(b"", b" ".join(pieces[index].split()))
    for index in range(1, len(pieces), 2):
        pieces[index] = pieces[index].strip()
    return b"\n".join(piece for piece in pieces if piece) + b"\x00" + b"\x00".join(literals)


# ----------------------------------------------------------------------------------------- CMake

_CMAKE_LEXEME = re.compile(
    rb"""
      (?P<comment> \#\[(?P<cmark>=*)\[[\s\S]*?\](?P=cmark)\] | \#[^\n]* )
    | (?P<text> "(?:[^"\\]|\\[\s\S])*" | \[(?P<tmark>=*)\[[\s\S]*?\](?P=tmark)\] | \\[\s\S] )
    """,
    re.VERBOSE,
)


def normalise_cmake(text: bytes) -> bytes:
    """Return a CMake file without comments and with no more white space than between arguments."""
    literals: list[bytes] = []

    def take(match: re.Match[bytes]) -> bytes:
        if match["comment"] is not None:
            return b" "
        literals.append(match[0])
        return _LITERAL

    text = b" ".join(_CMAKE_LEXEME.sub(take, text).split())
    text = re.sub(rb" ?([()]) ?", rb"\1", text)
    return text + b"\x00" + b"\x00".join(literals)


# ---------------------------------------------------------------------------------------- Python

_F_START = {getattr(tokenize, name, -1) for name in ("FSTRING_START", "TSTRING_START")} - {-1}
_F_END = {getattr(tokenize, name, -1) for name in ("FSTRING_END", "TSTRING_END")} - {-1}
_LAYOUT = {tokenize.INDENT: "\x02", tokenize.DEDENT: "\x03", tokenize.NEWLINE: "\x04"}


def normalise_python(text: str) -> str:
    """Return Python source as its tokens: no comments, docstrings, blank lines or layout width.

    The result is the same under every Python version that can read the source: an f-string is
    its source text. Raises SyntaxError or tokenize.TokenError for what is not Python.
    """
    lines = text.splitlines(keepends=True)
    statement: list[str] = []
    only_text = True  # so far, the statement is nothing but string literals
    out: list[str] = []
    depth = 0  # of nested f-strings
    start = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = token.type
        if kind in _F_START:
            start = token.start if depth == 0 else start
            depth += 1
        elif kind in _F_END:
            depth -= 1
            if depth == 0:
                statement.append(_source_between(lines, start, token.end))
                only_text = False
        elif depth or kind in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER):
            continue
        elif kind in _LAYOUT:
            if kind == tokenize.NEWLINE:
                if statement and not only_text:
                    out.extend([*statement, _LAYOUT[kind]])
                statement, only_text = [], True
            else:
                out.append(_LAYOUT[kind])
        else:
            statement.append(token.string)
            only_text = only_text and kind == tokenize.STRING and not _is_f_string(token.string)
    out.extend(statement)
    return "\x00".join(out)


def _is_f_string(literal: str) -> bool:
    prefix = literal[: min(literal.find(quote) % 99 for quote in "'\"")].lower()
    return "f" in prefix or "t" in prefix


def _source_between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    taken = lines[start[0] - 1 : end[0]]
    taken[-1] = taken[-1][: end[1]]
    taken[0] = taken[0][start[1] :]
    return "".join(taken)


# ------------------------------------------------------------------------------------ dispatching


def normalised_bytes(name: str, data: bytes) -> bytes:
    """Return the meaning of a source file's content, by the file's name; others unchanged."""
    suffix = os.path.splitext(name)[1].lower()
    if suffix in C_SUFFIXES:
        return normalise_c(data)
    if suffix in CMAKE_SUFFIXES or os.path.basename(name) == "CMakeLists.txt":
        return normalise_cmake(data)
    if suffix == ".py":
        try:
            return normalise_python(data.decode()).encode()
        except (SyntaxError, ValueError, tokenize.TokenError):
            return data
    return data


def normalised_digest(path: Path, cache: DigestCache | None = None) -> str:
    """Return the normalised digest of a source file."""

    def compute() -> str:
        return sha256_bytes(normalised_bytes(os.fspath(path), Path(path).read_bytes()))

    return compute() if cache is None else cache.get("meaning", path, compute)


# --------------------------------------------------------------------------------- measuring code


#: What each file of one folder of scripts imports, for scripts that are looked at together.
Imports = dict[Path, list[Path]]


def code_files(
    script: Path, cache: DigestCache | None = None, known: Imports | None = None
) -> list[Path]:
    """Return the script and every file of ours that it imports, however far down, sorted.

    Ours is what lies in the script's folder or below it. Files that a module names in
    ``MEASURES_WITH`` count too. ``known`` is filled, so that scripts of one folder that share
    modules have each looked at once. Raises RoutewiseError where one of them does not exist.
    """
    known = {} if known is None else known
    root = Path(script).resolve().parent
    found: set[Path] = set()
    queue = [Path(script).resolve()]
    while queue:
        path = queue.pop()
        if path in found:
            continue
        found.add(path)
        if path not in known:
            known[path] = _named_files(path, root, cache)
        queue.extend(known[path])
    return sorted(found)


def _named_files(path: Path, root: Path, cache: DigestCache | None) -> list[Path]:
    """Return the files of ours that one file imports or names."""
    if path.suffix != ".py":
        return []
    imports, extras = _references(path, cache)
    found: dict[Path, None] = {}
    for level, module in imports:
        base = path.parents[level - 1] if level else root
        found.update(dict.fromkeys(_module_files(base, module)))
    for extra in extras:
        named = (path.parent / extra).resolve()
        if not named.is_file():
            raise RoutewiseError(
                f"{path}: {EXTRA_FILES_NAME} names {extra}, which does not exist",
                "name files relative to the module",
            )
        found[named] = None
    return list(found)


def code_digest(
    script: Path, cache: DigestCache | None = None, known: Imports | None = None
) -> str:
    """Return one digest of the meaning of a script and of everything of ours that it imports.

    ``known`` as in :func:`code_files`.
    """
    return digest_of([[file, digest] for file, digest in code_parts(script, cache, known).items()])


def code_parts(
    script: Path, cache: DigestCache | None = None, known: Imports | None = None
) -> dict[str, str]:
    """Return the digest of each file that :func:`code_digest` covers, by its name, sorted.

    Names are relative to the script's folder.
    """
    root = Path(script).resolve().parent
    return {
        os.path.relpath(path, root): normalised_digest(path, cache)
        for path in code_files(script, cache, known)
    }


def check_code(script: Path, planned: str, results: Path) -> None:
    """Check, at the start of a job, that its code is what was planned.

    What an edit after planning measures would stand under the digest of the code before it, for
    good. ``results`` is the results folder, whose digests of unedited files need not be made again.

    Raises RoutewiseError where the code has another digest.
    """
    found = code_digest(script, DigestCache(results / ".cache" / "digests.json"))
    if found != planned:
        raise RoutewiseError(
            f"{Path(script).name}: the measuring code was edited after it was planned (it had the "
            f"digest {planned[:12]}, and has {found[:12]})",
            "run the same command again: it plans what is there now",
        )


def _references(path: Path, cache: DigestCache | None) -> tuple[list[tuple[int, str]], list[str]]:
    """Return what a module imports, as (dots, name), and the extra files that it names."""

    def compute() -> str:
        tree = ast.parse(path.read_bytes(), str(path))
        return json.dumps([list(_imports(tree)), list(_extra_files(tree))])

    try:
        text = compute() if cache is None else cache.get("references", path, compute)
    except FileNotFoundError as error:
        raise RoutewiseError(f"{path}: no such file") from error
    except SyntaxError as error:
        where = f"{path}:{error.lineno}"
        raise RoutewiseError(f"{where}: not valid Python ({error.msg})") from error
    imports, extras = json.loads(text)
    return [(level, name) for level, name in imports], extras


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield node.level, module
            for alias in node.names:
                yield node.level, f"{module}.{alias.name}".lstrip(".")


def _module_files(base: Path, module: str) -> Iterator[Path]:
    """Yield the files that importing ``module`` runs: its packages and itself, where ours."""
    here = base
    for part in [part for part in module.split(".") if part]:
        package = here / part / "__init__.py"
        plain = here / f"{part}.py"
        if package.is_file():
            yield package
        elif plain.is_file():
            yield plain
            return
        else:
            return
        here = here / part


def _extra_files(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(t, ast.Name) and t.id == EXTRA_FILES_NAME for t in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            if node.value is not None:
                yield from ast.literal_eval(node.value)
