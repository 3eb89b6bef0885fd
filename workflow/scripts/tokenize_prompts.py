"""Turn a prompt set into token ids with one model's template and tokenizer.

Reads the JSONL file and the GGUF; the tokenizer is that of the build in LIBRARY_DIR. Writes the
table ``prompts`` (schema/prompts.py): token ids, tokens to decode, and a digest of both for
each prompt.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from routewise.engine import load_engine
from routewise.errors import RoutewiseError, report_errors
from routewise.gguf_check import check_gguf
from routewise.model import read_model
from routewise.prompt import load_prompts, prompts_digest, read_template, tokenize_prompts
from routewise.schema.file import table_of, write_table
from routewise.schema.prompts import PROMPTS
from routewise.watch import end_with_snakemake

NO_TOKENIZER = (None, "no_vocab", "none")


@report_errors
def main(
    prompts: Path,
    model: Path,
    library_dir: Path,
    context: int | None,
    digest: str | None,
    output: Path,
) -> None:
    """Write the table ``prompts``; see :func:`routewise.prompt.tokenize_prompts`.

    Raises RoutewiseError where ``digest`` is given and the file's prompts have another.
    """
    loaded = load_prompts(prompts)
    if digest is not None and prompts_digest(loaded) != digest:
        raise RoutewiseError(
            f"{prompts}: was edited after it was planned (its prompts had the digest "
            f"{digest[:12]}, and have {prompts_digest(loaded)[:12]})",
            "run the same command again: it plans what is there now",
        )
    record = read_model(model)
    header = check_gguf(model)
    has_tokenizer = header.metadata.get("tokenizer.ggml.model") not in NO_TOKENIZER
    engine = load_engine(library_dir)
    opened = engine.open_model(model)
    try:
        columns = tokenize_prompts(
            loaded,
            read_template(header),
            opened.tokenize if has_tokenizer else None,
            n_vocab=opened.n_vocab,
            context=context,
        )
    finally:
        opened.close()
    provenance = {
        "prompt_set": prompts.name,
        "prompt_set_digest": prompts_digest(loaded),
        "model": record.name,
        "model_sha256": record.sha256,
        "engine_identity": engine.identity,
    }
    write_table(output, PROMPTS, table_of(PROMPTS, columns), provenance)
    counts = ", ".join(
        f"{name} {len(ids)}+{n_asked}"
        for name, ids, n_asked in zip(
            columns["prompt_id"], columns["token_ids"], columns["n_asked"], strict=True
        )
    )
    print(f"{output}: {len(loaded)} prompts (tokens + asked): {counts}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", required=True, type=Path, help="the JSONL file")
    parser.add_argument("--model", required=True, type=Path, help="the GGUF")
    parser.add_argument("--library-dir", required=True, type=Path, help="lib folder of a build")
    parser.add_argument("--context", type=int, help="tokens that a sequence may have")
    parser.add_argument("--digest", help="of the prompts, as planned")
    parser.add_argument("--output", required=True, type=Path, help="the Parquet file to write")
    end_with_snakemake()
    raise SystemExit(main(**vars(parser.parse_args())))
