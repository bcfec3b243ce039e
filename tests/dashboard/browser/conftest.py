"""Chromium and a live server with a strict Content-Security-Policy; browser errors fail the test."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.admin.factories import logged_in, make_superuser
from tests.dashboard.policy import StrictPolicy
from tests.support import PATIENCE

WATCH = """
window.djqComplaints = [];
addEventListener("securitypolicyviolation", (event) => {
  djqComplaints.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sourceFile}`);
});
"""
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

Open = Callable[..., Page]


@pytest.fixture(scope="package")
def browser(chromium_path: str) -> Iterator[Browser]:
    """One Chromium for this package: its event loop would be in the way of async tests of others."""
    expect.set_options(timeout=PATIENCE * 1_000)
    # Django's tables are used beside that loop, not in it.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=chromium_path, args=QUIET)
        yield chromium
        chromium.close()
    del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


@pytest.fixture
def strict(settings: Any) -> None:
    """Add the policy to every response."""
    path = f"{StrictPolicy.__module__}.{StrictPolicy.__qualname__}"
    settings.MIDDLEWARE = [path, *settings.MIDDLEWARE]


@pytest.fixture
def open_page(browser: Browser, live_server: Any, strict: None, memory: None) -> Iterator[Open]:
    """Open an address in a new window, logged in, or in a tab `beside` a page. Errors fail the test."""
    windows: list[tuple[BrowserContext, Page, list[str]]] = []

    def opened(
        address: str,
        user: User | None = None,
        *,
        width: int = 1280,
        scheme: str = "light",
        scripts: bool = True,
        expected: tuple[str, ...] = (),
        beside: Page | None = None,
    ) -> Page:
        if beside is not None:
            context = beside.context
        else:
            context = browser.new_context(
                base_url=live_server.url,
                viewport={"width": width, "height": 900},
                color_scheme="dark" if scheme == "dark" else "light",
                java_script_enabled=scripts,
                reduced_motion="reduce",
            )
            context.set_default_timeout(PATIENCE * 1_000)
            context.add_init_script(WATCH)
            session = logged_in(user or make_superuser()).cookies[django_settings.SESSION_COOKIE_NAME].value
            context.add_cookies(
                [{"name": django_settings.SESSION_COOKIE_NAME, "value": session, "url": live_server.url}]
            )
        page = context.new_page()
        heard: list[str] = []

        def hear(text: str) -> None:
            # A form that is refused comes again with status 400, which the browser reports as an error.
            if not any(word in text for word in (*expected, "status of 400 (Bad Request)")):
                heard.append(text)

        page.route("**/favicon.ico", lambda route: route.fulfill(status=204))
        page.on("console", lambda said: hear(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: hear(str(error)))
        page.on("response", lambda got: hear(f"{got.status} {got.url}") if got.status >= 500 else None)
        windows.append((context, page, heard))
        page.goto(address)
        return page

    yield opened
    complaints: list[str] = []
    for _, page, heard in windows:
        complaints += heard
        if not page.is_closed():
            complaints += page.evaluate("window.djqComplaints ?? []")
    for context in {context for context, _, _ in windows}:
        context.close()
    assert complaints == []
