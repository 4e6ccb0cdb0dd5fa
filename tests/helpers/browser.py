"""A headless Chromium for the tests, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One tab. `errors` holds what its console complained of, and exceptions nobody caught."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._socket, self._number = socket, 0
        self._answers: dict[int, asyncio.Future] = {}
        self._loaded = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            event = message.json()
            method, values = event.get("method"), event.get("params", {})
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif method == "Runtime.exceptionThrown":
                self.errors.append(str(values["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
                self.errors.append(str(values["args"]))
            elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
                self.errors.append(values["entry"]["text"])
            elif method == "Network.requestWillBeSent":
                self.requests.append(values["request"]["url"])
            elif method == "Page.loadEventFired":
                self._loaded.set()

    async def call(self, method: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": values})
        event = await asyncio.wait_for(answer, 60)
        assert "error" not in event, event
        return event["result"]

    async def open(self, file: Path, *, dark: bool = False) -> None:
        """Load it and wait until it says that it is ready."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=f"file://{file}")
        await asyncio.wait_for(self._loaded.wait(), 60)

    async def evaluate(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def press(self, key: str) -> None:
        codes = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowDown": 40, "Escape": 27}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text
            )

    async def screenshot(self, file: Path) -> None:
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=False)
        file.write_bytes(base64.b64decode(shot["data"]))

    async def frames(self, count: int = 3) -> None:
        """Let the page draw."""
        for _ in range(count):
            await self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 30)))")


@asynccontextmanager
async def browser_page(width: int = 1400, height: int = 900) -> AsyncIterator[Page]:
    """A tab of a browser of its own, ended with the block, with its temporary files."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        profile = Path(folder) / "profile"
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--remote-debugging-port=0", f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = {**os.environ, "TMPDIR": folder}
        process = subprocess.Popen([*command, "about:blank"], process_group=0, env=environment, **silent)
        try:
            port_file = profile / "DevToolsActivePort"
            async with asyncio.timeout(90):
                while not port_file.is_file() or "\n" not in port_file.read_text():
                    assert process.poll() is None, "Chromium ended at its start"
                    await asyncio.sleep(0.1)
            port = port_file.read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    tabs = [t for t in await answer.json() if t["type"] == "page"]
                async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    yield page
                    page._reader.cancel()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            while _is_there(process.pid):  # its children write into the profile until they have ended
                await asyncio.sleep(0.01)


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
