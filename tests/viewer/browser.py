"""Headless Chromium over its debugging pipe: just enough to load, click, look and listen."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest


class Browser:
    """One page in one headless Chromium.

    Messages are JSON with a NUL after each, on the file descriptors 3 and 4 of the browser.
    """

    def __init__(self, profile: Path, *, width: int = 1200, height: int = 800) -> None:
        binary = next(
            (
                p
                for n in ("chromium", "chromium-browser", "google-chrome")
                if (p := shutil.which(n))
            ),
            None,
        )
        if binary is None:
            pytest.skip("Chromium is not installed")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        arguments = [
            binary,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "about:blank",
        ]

        def as_3_and_4() -> None:
            # Through high numbers, so that neither covers the other.
            high_in, high_out = os.dup(to_browser), os.dup(from_browser)
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        self._process = subprocess.Popen(
            arguments,
            preexec_fn=as_3_and_4,
            pass_fds=(3, 4, to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._ids = itertools.count(1)
        self._buffer = b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.page(f"{domain}.enable")
        self.size(width, height)

    def send(self, method: str, session: str | None = None, **params: Any) -> Any:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._read(deadline)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer.get("result", {})
            self._note(answer)

    def page(self, method: str, **params: Any) -> Any:
        return self.send(method, self._session, **params)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser has gone"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def load(self, path: Path, fragment: str = "") -> None:
        self._loaded = False
        self.errors.clear()
        self.requests.clear()
        self.page("Page.navigate", url=path.resolve().as_uri() + fragment)
        deadline = time.monotonic() + 60
        while not self._loaded:
            self._note(self._read(deadline))

    def size(self, width: int, height: int) -> None:
        self.page(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def dark(self, on: bool) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.page("Emulation.setEmulatedMedia", features=scheme)

    def evaluate(self, expression: str) -> Any:
        result = self.page(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def click(self, x: float, y: float, count: int = 1) -> None:
        for number in range(1, count + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.page(
                    "Input.dispatchMouseEvent",
                    type=kind,
                    x=x,
                    y=y,
                    button="left",
                    clickCount=number,
                )

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.page("Input.dispatchMouseEvent", **{"type": kind, "x": x, "y": y, **more})

    def key(self, key: str) -> None:
        text = key if len(key) == 1 else ""
        self.page("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.page("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path) -> None:
        shot = self.page("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.send("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
