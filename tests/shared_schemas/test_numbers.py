"""Numbers in texts have the value that a reader gives them, exactly; answers about documents."""

import string
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_schemas.documents import normalise
from shared_schemas.numbers import LONGEST, last_number, read_number

FORMS: dict[int | Fraction, str] = {
    42: r"""42|+42|042|42.|42.0|4.2e1|420E-1|0.42e+2|$42|$ 42|€42|42 €|\$42|$42$|42%|42 %|42\%|**42**|*42*
        |`42`|_42_|(42)|[42]|<42>|"42"|\boxed{42}|$\boxed{42}$|\(42\)|\[42\]|\text{42}|**$42**|84/2|42/1
        |\frac{84}{2}"""
    + "|\uff14\uff12|\u0664\u0662|\u201c42\u201d|\u200b42|\u20b942",
    250: "1 000/4|1,000/4|1 000 / 4",
    -5: r"-5|-$5|$-5|-€5|(-5)|**-5**|-**5**|-\boxed{5}|\boxed{-5}|$-5$|-5.00|-10/2|10/-2"
    + "|\u22125|\u20135|\uff0d5",
    1000: r"""1,000|1 000|1000|1,000.00|$1,000|1'000|1_000|1{,}000|1\,000|1e3|1 x 10^3|1 \times 10^{3}
        |1*10^3|10^3|0.1e4""" + "|1\u2019000|1\u00a0000|1\u202f000|1\u2009000|1 \u00d7 10^3",
    1_234_567: "1,234,567|12,34,567|1234567.",
    Fraction(1, 2): r".5|0.50|1/2|50/100|1 / 2|1,000/2,000|\frac{1}{2}|\dfrac12|½|5e-1|0.5.",
    Fraction(5, 2): r"2 1/2|2½|2 ½|5/2|2.5|2\frac{1}{2}",
    Fraction(-3, 4): r"-3/4|-.75|-¾|-\frac{3}{4}",
}  # fmt: skip


def read(number) -> Fraction | None:
    """The value as a fraction, by arithmetic of Python's own."""
    if number is None or number.value is None:
        return None
    top, bottom, twos, fives = number.value
    return Fraction(top, bottom) * Fraction(2) ** twos * Fraction(5) ** fives


@pytest.mark.parametrize("value", FORMS)
def test_every_form_of_a_number_is_read_as_a_truth_and_in_an_answer(value):
    for form in (form.strip() for form in FORMS[value].split("|")):
        assert read(read_number(form)) == value, form
        assert read(last_number(f"7 x 8 = 9.\n####  {form} apples, so be it", marked=True)) == value, form
        assert read(last_number(f"7 x 8 = 9.\nSo it is {form} apples, so be it", marked=False)) == value, form


@pytest.mark.parametrize(
    "truth",
    ["", " ", "5 apples", "5km", "forty-two", "NaN", "inf", "1,00", "1.2.3", "1/2/3", "3:42", "2^5", "5/0",
     "1 2", "4-2", "9" * (LONGEST + 1), 10**LONGEST, True, False, None, float("nan"),
     float("inf"), ["42"], {"a": 1}],
)  # fmt: skip
def test_what_no_answer_can_equal_is_no_truth(truth):
    assert read_number(truth) is None


@pytest.mark.parametrize(
    ("truth", "text"), [(42, "42"), (1.5, "1.5"), (-0.0, "0"), (1e22, "10^22"), (0.1, "1/10")]
)
def test_a_truth_may_be_a_number_of_json(truth, text):
    assert read_number(truth).equals(read_number(text))


def test_equal_numbers_are_equal_whatever_their_size():
    huge = read_number("1e999999999")
    assert huge.equals(read_number("10e999999998"))
    assert read_number("1e999999999/2e999999998").equals(read_number("5"))
    assert not huge.equals(read_number("1e999999998"))
    # as floats these are equal
    assert not read_number("0.1").equals(read_number("0.1000000000000000000001"))


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("from 10-42", 42), ("x-5", 5), ("so --5", 5), ("in $5$-$8$", 8), ("- 42", 42), ("(3)-5", 5),
        ("f(-5)", -5), ("the answer\u20145", 5), ("...42", 42), ("it is.42", 42), ("42...", 42),
        ("1, 2, 42", 42), ("7*-42", -42), ("at 5:00", 5),
        ("10 20 300", 300),
        ("x" * 1000 + "42", 42), ("\u7b54\u6848\u662f42\u3002", 42), ("42" + " and so on" * 1000, 42),
        ("on 3/4/2020", None), ("v1.2.3", None), ("1,00", None), ("none", None),
        ("42" + "x" * LONGEST, None), ("9" * (LONGEST + 1), None),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text_is_read_with_its_own_sign(text, last):
    assert read(last_number(text, marked=False)) == last


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("1,2,42", 42), ("(1,2,42)", 42), ("-1,200,42", 42), ("1,2,-42", -42),
        ("1.5,2.5,0.5", Fraction(1, 2)),
        ("3/4,1/4,1/2", Fraction(1, 2)), ("1,2,42%", 42), (",".join(map(str, range(1, 421))), 420),
        (",000" * 400, None), ("1" + ",000" * 100, None),
        # a decimal comma, or a group of thousands: not to be told from a list
        ("1,5", None), ("1,2,3,000", None), ("1,000,00", None),
        ("5 and 1,000,500", 1_000_500), ("5 and 1,00,500", 100_500),
        ("3 100-dollar bills", 100), ("3 100\u2010dollar bills", 100), ("2 5 100-Euro-Scheine", 100),
        ("1 000-2 000", 2000), ("5 100_000", 100_000), ("1 000,50", None),
        ("Rooms 12 345", 12_345), ("12 345 people", 12_345), ("He earns 12 345.", 12_345),
    ],
)  # fmt: skip
def test_a_list_is_not_one_number_with_thousands(text, last):
    assert read(last_number(text, marked=False)) == last


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("#### 41 no, #### 42", 42), ("#### 42\n#### none", 42), ("####\u00a042", 42), ("#### - 42", -42),
        ("#### 42" + " and 7" * 1000, 42), ("####42", None), ("#### about 42", None),
        ("####\n42", None), ("42", None), ("#### 1,2,42", None), ("#### 12 345 people", 12_345),
        ("#### rooms 12 345", None), ("#### 3 100-dollar bills", 3),
    ],
)  # fmt: skip
def test_after_the_mark_stands_the_number_alone(text, last):
    assert read(last_number(text, marked=True)) == last


@settings(max_examples=200)
@given(st.data())
def test_a_number_that_is_written_in_any_form_is_read_back(data):
    value = data.draw(st.decimals(-(10**9), 10**9, places=data.draw(st.integers(0, 4))))
    size = abs(value)
    body = data.draw(
        st.sampled_from([f"{size:f}", f"{size:,f}", f"{size:e}", f"{size:f}/1", f"{size:f}/1.0"])
    )
    sign = "" if value >= 0 else data.draw(st.sampled_from(["-", "\u2212", "\u2013"]))
    before, after = data.draw(
        st.sampled_from([("", ""), ("$", ""), ("**", "**"), ("\\boxed{", "}"), ("(", ")")])
    )
    form = data.draw(st.sampled_from([sign + before, before + sign])) + body + after
    assert read(read_number(form)) == Fraction(value)
    for text in (f"#### {form}.", f"####  {form} shells"):
        assert (
            read(last_number(text, marked=True)) == read(last_number(text, marked=False)) == Fraction(value)
        )


@pytest.mark.parametrize("form", ["-1,234.50", "$-3/4", "-$1.5e3", "-\\boxed{42}"])
@pytest.mark.parametrize("filler", ["x", " y", "("])
def test_no_padding_cuts_a_number(form, filler):
    value = read(read_number(form))
    for count in (*range(20), *range(LONGEST - 15, LONGEST + 15)):
        for text in (
            f"#### {form}" + filler * count,
            filler * count + f" #### {form}",
            f"3 #### {form} {'x' * count}",
        ):
            for marked in (True, False):
                number = last_number(text, marked=marked)
                assert number is None or read(number) == value, (text, marked)


@given(st.text(string.digits + " .,/-+$*#(){}\\ex^\u00a0½", max_size=30))
def test_every_truth_is_equalled_by_itself_as_an_answer(text):
    truth = read_number(text)
    if truth is not None:
        assert truth.equals(last_number(f"#### {text.strip()}", marked=True))
    last_number(text, marked=False)  # any text is read


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("The Amber Harbour.", "amber harbour"),
        ("1,000 boats", "1000 boats"),
        ("-3.5", "-3.5"),
        ("pages 3-5", "pages 3 5"),
        ("Ｆｕｌｌ  width", "full width"),  # noqa: RUF001
        ("?!", ""),
        ("A", "a"),
        ("42.0", "42"),
        ("3.50 m", "3.5 m"),
        ("1,234,567.80", "1234567.8"),
        ("007 or -0.0", "7 or 0"),
        ("1,5", "1,5"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_case_punctuation_articles_and_commas_in_numbers_do_not_count(answer, form):
    assert normalise(answer) == form
