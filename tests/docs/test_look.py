"""What `website.look` finds on pages that have a fault each, and where no browser is."""

import pytest

from website.look import WIDTHS, chromium, faults, look

HEAD = "<!doctype html><html><head><meta charset='utf-8'><title>t</title></head><body>"
WIDE = "<div style='width: 600px'>wide</div>"
PAGES = {
    "good.html": HEAD + f"<p>text</p><div style='overflow: auto'>{WIDE}</div>",
    "wide.html": HEAD + WIDE,
    "throws.html": HEAD + "<script>throw new Error('broken script')</script>",
    "says.html": HEAD + "<script>console.error('said', 'so')</script>",
    "image.html": HEAD + "<img src='nowhere.png'>",
    "elsewhere.html": HEAD + "<img src='http://127.0.0.1:9/x.png'>",
    "fragment.html": "<p>no head at all</p>",
}


@pytest.mark.long
@pytest.mark.skipif(chromium() is None, reason="no Chromium")
def test_each_fault_is_found_and_nothing_else(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name, text in PAGES.items():
        (folder / name).write_text(text)
    found = list(look(folder, sorted(folder.iterdir()), chromium()))
    assert len(found) == len(PAGES) * len(WIDTHS)
    lines = {}
    for each in found:
        lines.setdefault(each["page"], {})[each["width"]] = "\n".join(faults(each))
    assert lines["good.html"] == lines["fragment.html"] == {1280: "", 390: ""}
    assert lines["wide.html"][1280] == ""
    assert "600px" in lines["wide.html"][390]
    for name, said in (("throws", "broken script"), ("says", "said so"), ("image", "nowhere.png")):
        assert all(said in lines[f"{name}.html"][width] for width in WIDTHS)
    assert "asks another host: http://127.0.0.1:9/x.png" in lines["elsewhere.html"][390]
