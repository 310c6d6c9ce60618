"""The page at /, in headless Chromium: talking, stopping, thinking folded, what lies where; phone, keyboard, dark."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from server.serving import Serving, until

import coli

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


@pytest.fixture(scope="module")
def url():
    """The demo model, half of its experts on a device of ordinary memory."""
    with Serving(lambda: coli.load("demo", threads=1, devices="fake:16MiB")) as client:
        yield f"http://127.0.0.1:{client.port}/"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, url):
    """A tab whose every request must go to the server and whose script must not fail."""
    page = browser.new_page(viewport={"width": 1200, "height": 760})
    outside, errors = [], []
    page.on("request", lambda request: request.url.startswith((url, "data:", "blob:")) or outside.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    yield page
    page.close()
    assert (outside, errors) == ([], [])


def picture(page, name: str) -> None:
    """Kept where COLI_TEST_PICTURES names a folder, to look at."""
    folder = os.environ.get("PAGE_PICTURES")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def ask(page, text: str) -> None:
    page.fill("#text", text)
    page.keyboard.press("Enter")


def test_page_talks_and_shows_what_lies_where(page):
    """By keyboard alone: an answer with its thought folded and its speed beside it; memory and heat are shown."""
    for text in ("Hello! Who are you?", "What would you like for dinner?"):
        ask(page, text)
        page.wait_for_selector("#send:text('Send')")
        until(lambda: page.evaluate("[...document.querySelectorAll('.meta')].every(m => m.textContent)"), 20)
    answers = page.query_selector_all(".turn.assistant")
    assert len(answers) == 2 and "tok/s" in answers[1].inner_text()
    assert page.query_selector("details.thought") and not page.query_selector("details.thought[open]")
    until(
        lambda: page.evaluate(
            "document.querySelectorAll('.place').length === 2 && document.getElementById('heat').width > 1"
        )
    )
    page.wait_for_timeout(700)
    assert "fake0" in page.inner_text("#places") and "CPU" in page.inner_text("#places")
    assert (
        page.evaluate("document.getElementById('heat').width"),
        page.evaluate("document.getElementById('heat').height"),
    ) == (40, 8)
    picture(page, "desktop")


def test_page_escape_stops_an_answer(page, url):
    """Escape ends a long answer; what was said stays, and the server computes no more."""

    def endless(route):
        body = {**route.request.post_data_json, "logit_bias": {"4082": -100, "4084": -100}}
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", endless)
    ask(page, "Tell me everything")
    page.wait_for_selector("#send:text('Stop')")
    page.wait_for_selector(".turn.assistant:not(:empty) details.thought")
    page.keyboard.press("Escape")
    page.wait_for_selector(".meta:text('stopped')")
    until(lambda: page.evaluate("fetch('/coli/stats').then(r => r.json()).then(s => s.server.running)") == 0)


def test_page_on_a_phone_and_in_the_dark(page):
    """At phone width nothing is wider than the screen and the picture is folded away; dark follows the system."""
    page.set_viewport_size({"width": 380, "height": 720})
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    ask(page, "Hello!")
    page.wait_for_selector(".meta:text('tokens')")
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    assert not page.evaluate("panel.open")
    picture(page, "phone-dark")
    page.click("aside summary")
    until(lambda: page.evaluate("document.querySelectorAll('.place').length === 2"))
    page.wait_for_timeout(300)
    picture(page, "phone-dark-open")


def test_page_asks_for_the_key(browser):
    """With a key set the page can be opened, asks for it, and then works."""
    with Serving(lambda: coli.load("demo", threads=1, devices="none"), app={"api_key": "k"}) as client:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{client.port}/")
        page.wait_for_selector("#door:not([hidden])")
        page.fill("#key", "k")
        page.keyboard.press("Enter")
        until(lambda: page.evaluate("document.getElementById('model').textContent === 'demo'"))
        assert "heat is not counted" in page.inner_text("#heatnote")
        page.close()
