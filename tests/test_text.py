"""Text for people: tables whose cells stay in their columns, text that is taken as it is, templates."""

import pytest
from jinja2 import UndefinedError

from basis_rl.text import escape_markdown, markdown_table, render


def test_cells_keep_to_their_columns():
    text = markdown_table([["a|b", "two\nlines"], [1, ""]], ["x|y", "z"])
    assert text.split("\n") == ["| x\\|y | z |", "| --- | --- |", "| a\\|b | two lines |", "| 1 |  |"]


def test_markup_is_text():
    assert (
        escape_markdown("`a` *b* _c_ [d] #e <f> &\n g\\")
        == "\\`a\\` \\*b\\* \\_c\\_ \\[d\\] \\#e &lt;f&gt; &amp; g\\\\"
    )
    assert markdown_table([[escape_markdown("\\|")]], ["a"]).splitlines()[-1] == "| \\\\\\| |"


def test_a_template_gets_all_it_names_and_escapes_in_html_alone(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ rows | table(['a']) }}\n{% if x %}\n{{ x }}\n{% endif %}\n")
    assert render(path, rows=[["|"]], x="<") == "| a |\n| --- |\n| \\| |\n<\n"
    assert render(path, html=True, rows=[], x="<").endswith("&lt;\n")
    with pytest.raises(UndefinedError):
        render(path, rows=[])
