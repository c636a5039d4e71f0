"""Tiny local copies of the benchmarks, with the columns of the originals."""

import json

SUMS = [(1, 2), (3, 4), (5, 6), (7, 8), (2, 9), (12, 3), (20, 11), (9, 9)]


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def row_of(name, a, b, answer):
    """A row of a benchmark that asks for a + b, with `answer` as the right one."""
    asked = f"What is {a} plus {b}?"
    text = str(answer)
    return {
        "asdiv": {"body": f"Jan has {a} and {b}.", "question": asked, "answer": f"{text} (in all)",
                  "formula": "", "solution_type": "Addition"},
        "svamp": {"Body": f"Jan has {a} and {b}.", "Question": asked, "Answer": text,
                  "question_concat": ""},
        "amc23": {"question": asked, "answer": answer},
        "gsm8k": {"question": asked, "answer": f"Both.\n#### {text}"},
        "math500": {"problem": asked, "solution": f"It is $\\boxed{{{text}}}$.", "answer": text},
    }[name.removesuffix("-value")]  # fmt: skip


def write_all(folder):
    """All of them, with true sums."""
    for name in ("asdiv", "svamp", "amc23", "gsm8k", "gsm8k-value", "math500"):
        write_rows(folder / f"{name}.jsonl", [row_of(name, a, b, a + b) for a, b in SUMS])
    return folder
