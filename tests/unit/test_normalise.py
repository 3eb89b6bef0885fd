"""Source text by its meaning: what must not move a digest, and what must."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routewise.errors import RoutewiseError
from routewise.normalise import (
    code_digest,
    code_files,
    normalise_c,
    normalise_cmake,
    normalise_python,
    normalised_bytes,
)

SAME_C = [
    ("int a = 1;", "int  a\n=\t1 ;"),
    ("int a; // one", "int a;"),
    ("int a; // one \\\n still the comment\nint b;", "int a; int b;"),
    ("int a; /* one\n two */ int b;", "int a; int b;"),
    ("a+b", "a + b"),
    ("f (x , y) ;", "f(x,y);"),
    ("x = -1;", "x=-1;"),
    ('puts("a"  "b");', 'puts( "a" "b" );'),
    ("#define A 1 // one\nint x;", "#define A 1\nint x;"),
    ("#define A(x) \\\n   (x)\n", "#define A(x) (x)\n"),
    ("  #  if X\nint a;\n#endif", "#  if X\nint a;\n#endif"),
    ("#if A /* over\n lines */ && B\n#endif", "#if A && B\n#endif"),
    ("int a;\r\nint b;\r\n", "int a;\nint b;\n"),
    ("#error don't\nint a; // isn't\n", "#error don't\nint a;\n"),
    ("x = 1'000; // don't", "x = 1'000;"),
    ("x = 0xff'ff; y = 'a'; // it's", "x = 0xff'ff; y = 'a';"),
    ("case'a': // it's\n;", "case'a':;"),
    ('"a \\" // b"; // c', '"a \\" // b";'),
    ("'\"'; // c\n'\"'", "'\"'; '\"'"),
    ("'\\''; // c", "'\\'';"),
    ('u8R"x(a)x"; // c', 'u8R"x(a)x";'),
]
OTHER_C = [
    ("int a;", "inta;"),
    ("a + +b", "a ++b"),
    ("a - -b", "a--b"),
    ("a & &b", "a&&b"),
    ("a / *b", "a /*b*/"),
    ("x - > y", "x->y"),
    ("a < b", "a << b"),
    ('"a b"', '"a  b"'),
    ('"a // b"', '"a "'),
    ('"/* */"', '""'),
    ("' '", "'  '"),
    ('R"(a // b)"', 'R"(a )"'),
    ('R"(a\\\nb)"', 'R"(ab)"'),
    ('R"x(a)" // )x"', 'R"x(a)"  )x"'),
    ("#define A 1\nint x;", "#define A 1 int x;"),
    ("#define F(x) x", "#define F (x) x"),
    ("#if A\nint a;\n#endif", "#if A\n#endif\nint a;"),
    ("int a; // b\nint c;", "int a; // b int c;"),
    ("// a \\\nint b;", "// a\nint b;"),
    ("L 'a'", "L'a'"),
    ("1.0f", "1.0 f"),
    ("0.0f", "-0.0f"),
    ('f("a", "b")', 'f("b", "a")'),
    ('X "a"', 'X"a"'),
]


@pytest.mark.parametrize(("one", "two"), SAME_C)
def test_c_that_means_the_same(one: str, two: str) -> None:
    assert normalise_c(one.encode()) == normalise_c(two.encode())


@pytest.mark.parametrize(("one", "two"), OTHER_C)
def test_c_that_means_something_else(one: str, two: str) -> None:
    assert normalise_c(one.encode()) != normalise_c(two.encode())


def test_an_unclosed_quote_does_not_take_for_ever() -> None:
    normalise_c(b'#error "' + b"don't do this " * 20_000 + b"\nint a;")


C_PARTS = st.lists(
    st.sampled_from(
        ["a", "1", "+", "-", ">", "(", ")", ";", '"s // t"', "'c'", "/", "*", "::", "&"]
    )
)


@given(C_PARTS, st.data())
def test_any_layout_between_tokens_is_the_same(parts: list[str], data: st.DataObject) -> None:
    blanks = st.sampled_from([" ", "\n", "\t ", " /* c */ ", " // c\n", " \\\n "])
    laid_out = "".join(part + data.draw(blanks) for part in parts)
    assert normalise_c(laid_out.encode()) == normalise_c(" ".join(parts).encode())


def test_normalising_keeps_every_token_for_the_compiler(tmp_path: Path) -> None:
    """The normal form of code without literals is itself code, and of the same tokens."""
    code = b"int f(int a,int b){ return a + +b - -a << 2 >= b && a != b ? a : b; }  // c\n"
    form = normalise_c(code).split(b"\x00")[0]
    sizes = []
    for name, text in (("one.c", code), ("two.c", form)):
        (tmp_path / name).write_bytes(text)
        command = ["cc", "-O2", "-c", name, "-o", "out.o"]
        subprocess.run(command, cwd=tmp_path, check=True)
        subprocess.run(["strip", "out.o"], cwd=tmp_path, check=True)
        sizes.append((tmp_path / "out.o").read_bytes())
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("set(A  1) # one\n", "set( A\n 1 )", True),
        ("set(A 1)\n#[[ long\n comment ]]\nset(B 2)", "set(A 1)\nset(B 2)", True),
        ("#[==[ a ]] b ]==] set(A 1)", "set(A 1)", True),
        ('set(A "# no comment")', 'set(A "")', False),
        ('set(A "a  b")', 'set(A "a b")', False),
        ("set(A [[ # text ]])", "set(A [[ ]])", False),
        ("set(A \\# b)", "set(A \\)", False),
        ("set(A a b)", "set(A ab)", False),
    ],
)
def test_cmake(one: str, two: str, same: bool) -> None:
    assert (normalise_cmake(one.encode()) == normalise_cmake(two.encode())) is same


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("x = 1  # one\n", "x = 1\n", True),
        ('"""Doc."""\nx = 1\n', "x = 1\n", True),
        ('def f():\n    "doc" "more"\n    return 1\n', "def f():\n  return 1\n", True),
        ("def f(a,\n      b):\n    pass\n", "def f(a, b):\n    pass\n", True),
        ("x = 1\n\n\ny = 2\n", "x = 1\ny = 2\n", True),
        ('x = f"{a}"\n', 'x = f"{b}"\n', False),
        ('x = f"{a:>{w}} {b!r}"  # c\n', 'x = f"{a:>{w}} {b!r}"\n', True),
        ('x = f"a  b"\n', 'x = f"a b"\n', False),
        ('f"{a()}"\n', "", False),
        ('x = "doc"\n', "", False),
        ("x = 1\n", "x = 2\n", False),
        ("if a:\n    b\nc\n", "if a:\n    b\n    c\n", False),
        ("if a:\n    b\n\nc\n", "if a:\n  b\n# d\nc\n", True),
    ],
)
def test_python(one: str, two: str, same: bool) -> None:
    assert (normalise_python(one) == normalise_python(two)) is same


def test_python_is_the_same_under_every_version(repository: Path) -> None:
    """Other interpreters, where this machine has them, make the same of all our code."""
    program = (
        "import hashlib, sys; sys.path.insert(0, 'workflow/scripts');"
        "from pathlib import Path; from routewise.normalise import normalise_python;"
        "print([hashlib.sha256(normalise_python(p.read_text()).encode()).hexdigest()"
        " for p in sorted(Path('workflow/scripts').rglob('*.py'))])"
    )
    answers = {}
    for python in (sys.executable, "python3.11", "python3.12", "python3.13", "python3.14"):
        try:
            done = subprocess.run(
                [python, "-c", program], cwd=repository, capture_output=True, text=True
            )
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            answers[python] = done.stdout
    assert answers[sys.executable].count(",") > 5
    assert len(set(answers.values())) == 1


def test_a_file_of_no_known_kind_counts_byte_by_byte() -> None:
    assert normalised_bytes("a.txt", b"a  # b") == b"a  # b"
    assert normalised_bytes("x/CMakeLists.txt", b"a  # b") != b"a  # b"
    assert normalised_bytes("broken.py", b"def (") == b"def ("


# --------------------------------------------------------------------------------- measuring code


MEASURE = "import sys\nfrom ours import outer\nfrom ours.deep.leaf import value\n"


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    """Make a script that imports `inner` twice removed, and `late` within a function."""
    files = {
        "measure.py": MEASURE,
        "unused.py": "x = 1\n",
        "ours/__init__.py": "",
        "ours/outer.py": "from ours.inner import f\n\ndef g():\n    from . import late\n",
        "ours/inner.py": 'MEASURES_WITH = ("../shim/shim.cpp",)\n\ndef f():\n    return 1\n',
        "ours/late.py": "import ours.outer\n",
        "ours/other.py": "y = 1\n",
        "ours/deep/__init__.py": "",
        "ours/deep/leaf.py": "value = 1\n",
        "shim/shim.cpp": "int a;  // one\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_code_of_a_measurement_is_found(scripts: Path) -> None:
    found = [os.path.relpath(path, scripts) for path in code_files(scripts / "measure.py")]
    assert found == [
        "measure.py",
        "ours/__init__.py",
        "ours/deep/__init__.py",
        "ours/deep/leaf.py",
        "ours/inner.py",
        "ours/late.py",
        "ours/outer.py",
        "shim/shim.cpp",
    ]


@pytest.mark.parametrize(
    ("file", "text", "moves"),
    [
        ("measure.py", f'"""Doc."""\n{MEASURE}# end\n', False),
        ("ours/other.py", "y = 2\n", False),
        ("unused.py", "x = 2\n", False),
        ("shim/shim.cpp", "int  a; // two\n", False),
        ("shim/shim.cpp", "int b;\n", True),
        ("ours/late.py", "import ours.outer\nz = 1\n", True),
        ("ours/deep/leaf.py", "value = 2\n", True),
    ],
)
def test_its_digest_follows_its_meaning(scripts: Path, file: str, text: str, moves: bool) -> None:
    before = code_digest(scripts / "measure.py")
    (scripts / file).write_text(text)
    assert (code_digest(scripts / "measure.py") != before) is moves


def test_its_digest_does_not_know_its_folder(scripts: Path, tmp_path: Path) -> None:
    before = code_digest(scripts / "measure.py")
    moved = tmp_path.parent / f"{tmp_path.name}-moved"
    scripts.rename(moved)
    assert code_digest(moved / "measure.py") == before
    moved.rename(scripts)


def test_a_missing_extra_file_is_an_error(scripts: Path) -> None:
    (scripts / "shim/shim.cpp").unlink()
    with pytest.raises(RoutewiseError, match="MEASURES_WITH names"):
        code_digest(scripts / "measure.py")
    with pytest.raises(RoutewiseError, match="no such file"):
        code_files(scripts / "absent.py")


@pytest.mark.parametrize("script", ["compare_routes", "measure_serving"])
def test_a_change_of_one_table_leaves_what_never_touches_it(script: str) -> None:
    """Serving reads and writes no logits rows: their table is no part of its code."""
    scripts = Path(__file__).parents[2] / "workflow" / "scripts"
    schema = scripts / "routewise" / "schema"
    serving = code_files(scripts / f"{script}.py")
    assert schema / "replies.py" in serving
    assert schema / "replay.py" not in serving
    assert schema / "replay.py" in code_files(scripts / "measure_replay.py")
    assert schema / "replies.py" not in code_files(scripts / "measure_replay.py")
    for other in ("cost.py", "study.py"):
        assert schema / other not in serving
