"""Most rows dropped is a warning that says what may be wrong."""

import pytest

from stars_fast.data.tokenised import ChatInfo


def info(**counts):
    kept = {"source_rows": 100, "null_rows": 0, "dropped": {}, "rows": 100, "without_target": 0}
    return ChatInfo(**{**kept, **counts}, unread=[], truncated=0, documents=1, tokens=1, targets=1)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"null_rows": 51, "rows": 49}, "51 of 100: is the text in other columns"),
        ({"dropped": {"tool_calls": 60}, "rows": 40}, "60 of 100: they say something outside"),
        ({"without_target": 80}, "before an answer, or no message has the role"),
        ({"null_rows": 50, "rows": 50, "without_target": 30}, "30 of 50: they are cut off"),
    ],
)  # fmt: skip
def test_a_warning(counts, said):
    assert said in info(**counts).warning


def test_none_where_most_rows_are_trained_on():
    assert info(null_rows=20, rows=80, without_target=40).warning is None
