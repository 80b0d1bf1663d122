"""`examples/browser` in Chromium: it writes what the package writes (make ecosystem)."""

import re
import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

import lineartime


def text(page, **shown):  # of the page, once it waits and shows this
    for name, value in {"go": "Write", "note": "", **shown}.items():
        page.locator(f"#{name}", has_text=re.compile(f"^{value}$")).wait_for(state="attached", timeout=60_000)
    return page.text_content("#text")


def write(page, tokens, given="", **shown):
    for name, value in (("given", given), ("heat", "0"), ("most", str(tokens))):
        page.fill(f"#{name}", value)
    page.click("#go")
    return text(page, **shown)


def choose(page, button, path, **shown):
    with page.expect_file_chooser() as chooser:
        page.click(f"text={button}")
    chooser.value.set_files(path)
    text(page, **shown)


@pytest.mark.ecosystem
def test_the_page(tmp_path, pytestconfig):
    """A text goes on as if it had not stopped; damage is refused in a line; no host is asked."""
    from playwright.sync_api import sync_playwright
    build = (pytestconfig.rootpath / "examples/browser/index.html").read_text().split(":\n")[1].split(" && python3")[0]
    subprocess.run(re.sub(r"\bout\b", str(tmp_path), build), shell=True, check=True, cwd=pytestconfig.rootpath)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path / "browser"))
    Thread(target=server.serve_forever, daemon=True).start()
    state, weights, asked = tmp_path / "state", tmp_path / "browser/small/model.safetensors", []
    model, tokenizer, _ = lineartime.load_model("small")
    halves, whole = (given + lineartime.generate(model, [given], tokenizer=tokenizer, max_new_tokens=800)[0]
                     for given in ("½ ½ ½ ½ ½ ½ ½ ½ ½", "“It was"))
    with sync_playwright() as player:
        page = player.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"]).new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        assert write(page, 800, halves[:17]) == halves  # half of its characters are two tokens
        page.click("text=New text")
        text(page, length="0")
        page.fill("#given", "“It was")
        page.click("#go")
        page.locator("#length", has_text=re.compile("[1-9]")).wait_for()
        page.click("#go")  # Stop
        stopped, left, size = text(page), 803 - int(page.text_content("#length")), page.text_content("#size")
        with page.expect_download() as saved:
            page.click("text=Save state")
        saved.value.save_as(state)
        assert write(page, left, size=size) == whole and whole.startswith(stopped) and 0 < left < 800
        page.reload()
        choose(page, "Open state", state, text="… *", size=f"{state.stat().st_size:,}")
        assert write(page, left, size=size) == "… " + whole[len(stopped):]
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
        choose(page, "Open model", weights.parent, text="", length="0", size=size)
        choose(page, "Open state", state, note="flash: state is damaged, or another model's state")
        weights.write_bytes(weights.read_bytes()[:-1])
        choose(page, "Open model", weights.parent, note="flash: model.safetensors has no .* numbers")
        assert write(page, 9, "It was") > "It was" and all(url.startswith(page.url) for url in asked)
