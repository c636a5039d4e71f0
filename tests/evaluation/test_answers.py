"""What counts as the right answer."""

import pytest

from stars_fast.evaluation.answers import boxed, same_answer, score_math, score_number


@pytest.mark.parametrize(
    ("response", "target"),
    [
        ("So there are 18.", "18"),
        ("the answer is 18.0", "18 (apples)"),
        ("It costs $18.", "18.00"),
        ("That is 1,800 dollars.", "1800"),
        ("1{,}800", "1,800"),
        ("a total of 12,345.50", "12345.5"),
        ("first 3, then 1,8", "8"),
        ("x = -3", "-3"),
        ("x = −3", "-3"),
        ("it sank to -$5", "-5"),
        ("10-3=7", "7"),
        ("9 - 5", "5"),
        ("0.5", "1/2"),
        (r"\frac{3}{4} of it", "0.75"),
        ("half, .5", "0.5"),
        (r"So \boxed{42}, checked in 3 ways.", "42"),
        (r"\boxed{1} no, \boxed{\text{about } 2,000}", "2000"),
        (r"\boxed{x} is 7", "7"),
        ("The ratio is 3:2.", "3:2"),
        ("They leave at 7:00.", "7:00 (am)"),
        ("We compare them.\nJan is taller.", "Jan (is taller)"),
        (r"\boxed{\text{Jan}} and not Tom", "Jan"),
        (r"\boxed{10\text{ cm}^2}", "10"),
        (r"\boxed{5\ \text{m}^2}", "5"),
        (r"\boxed{5\,\mathrm{m}^{2}}", "5"),
        (r"\boxed{9.8 \text{ m/s}^{-2}}", "9.8"),
        (r"\boxed{9 \text{ m\,s^{-2}}}", "9"),
        (r"\boxed{7\text{ cm}$^3$}", "7"),
        ("an area of 12 cm^2.", "12"),
        ("an area of 12 cm².", "12"),
        (r"\boxed{5 \text{ kg of CO}_2}", "5"),
        (r"\boxed{x_1 = 4}", "4"),
        (r"\boxed{x^2} where x is 3", "3"),
        (r"\boxed{1\,200}", "1200"),
        (r"\boxed{1\,234\,567\text{ km}}", "1,234,567"),
        (r"\boxed{\frac12}", "1/2"),
        (r"\boxed{-\frac 1{12}}", "-1/12"),
        (r"\boxed{\frac{ -1 }{ 2 }}", "-0.5"),
        (r"\boxed{2\frac{1}{2}}", "2.5"),
        (r"\boxed{-2\,\dfrac12}", "-5/2"),
        (r"\boxed{2\ \frac{1}{2}\text{ hours}}", "5/2 (hours)"),
        ("It takes 2 1/2 hours.", "2.5"),
        ("2.5", "2 1/2 (hours)"),
        (r"\boxed{18 \text{ (in 3 days)}}", "18"),
        (r"\boxed{18 (3 each)}", "18 (apples)"),
        (r"\boxed{(18)}", "18"),
        (r"\boxed{\left(\frac{1}{2}\right)}", "0.5"),
        (r"\boxed{90^\circ}", "90"),
        (r"\boxed{90^{\circ}\text{C}}", "90"),
        ("30°", "30"),
        (r"\boxed{25\%}", "25"),
        ("25%", "25 (%)"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{x=-5}", "-5"),
        (r"\boxed{x=-\frac{3}{4}}", "-0.75"),
        ("3 2", "3:2"),
        ("The shares are 2 3/2.", "2:3/2"),
        (r"So \boxed {42}, checked in 3 ways.", "42"),
        (r"\boxed{1} no, \boxed {2}, of 3", "2"),
        pytest.param("7" * 5000, "7" * 5000, id="longer than Python's integers"),
        pytest.param("0." + "3" * 5000 + " is not 1/3", "1/3", id="a long decimal first"),
    ],
)
def test_right(response, target):
    assert same_answer(response, target)


@pytest.mark.parametrize(
    ("response", "target"),
    [
        ("", "18"),
        ("no idea", "18"),
        ("18 and then 19", "18"),
        ("1.8", "18"),
        ("18.01", "18"),
        ("5-3", "-3"),
        (r"18, so \boxed{19}", "18"),
        ("2:3", "3:2"),
        ("2", "3:2"),
        ("Jan is tall.\nTom is taller.", "Jan"),
        ("January", "Jan"),
        ("anything", ""),
        (r"\boxed{10\text{ cm}^2}", "2"),
        (r"\boxed{5\,\mathrm{m}^{2}}", "2"),
        (r"\boxed{11\text{ cm}^2}", "10"),
        (r"\boxed{2 \text{ people}}", "18"),
        (r"\boxed{1\,200}", "200"),
        (r"\boxed{1\,20}", "120"),
        (r"\boxed{1,\,200}", "1200"),
        (r"\boxed{\frac12}", "12"),
        (r"\boxed{\frac12}", "2"),
        (r"\boxed{2\frac{1}{2}}", "21/2"),
        (r"\boxed{2\frac{1}{2}}", "1/2"),
        (r"\boxed{5\frac12}", "51/2"),
        ("It takes 2 1/2 hours.", "1/2"),
        ("2 3/2", "7/2"),
        ("Step 2\n1/2 is left.", "5/2"),
        ("Step 2\n\\frac{1}{2} is left.", "5/2"),
        ("from 3.2 1/2 is left", "5/2"),
        (r"\boxed{18 \text{ (in 3 days)}}", "3"),
        (r"\boxed{5 \text{ kg of CO}_2}", "2"),
        (r"\boxed{x = 5}", "-5"),
        (r"\boxed{10^\circ}", "100"),
        pytest.param("7" * 5000, "7", id="a response that repeats itself"),
        pytest.param("1/" + "7" * 5000, "1", id="over a long number"),
        pytest.param("1" + " 1/2" + "0" * 5000, "3/2", id="mixed with a long number"),
    ],
)
def test_wrong(response, target):
    assert not same_answer(response, target)


def test_boxes():
    assert boxed(r"\boxed{1} and \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1} and \boxed{2") is None
    assert boxed("none") is None


def test_scores_of_the_tasks():
    assert score_number({"answer": "9 (apples)"}, ["9"]) == {"exact_match": 1}
    assert score_number({"Answer": 9.0}, ["8"]) == {"exact_match": 0}
    solution = {"answer": "He has 4 / 2 = <<4/2=2>>2.\n#### 1,200"}
    assert score_number(solution, [r"So $\boxed{1200}$."]) == {"exact_match": 1}
    assert score_number(solution, ["2"]) == {"exact_match": 0}
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    doc = {"answer": "27.0"}
    assert score_math(doc, [r"so $m+n = \boxed{27}$."]) == {"math_verify": 1}
    assert score_math(doc, [r"so $\boxed{\frac{54}{2}}$"]) == {"math_verify": 1}
    assert score_math(doc, [r"so $\boxed{26}$, near 27"]) == {"math_verify": 0}
