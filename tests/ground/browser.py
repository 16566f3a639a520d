"""A real browser: Chromium without a window, driven by its DevTools protocol."""

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType

from ground import cache, packages
from ground.instance import Instance
from ground.poll import PATIENCE_SECONDS, eventually, soon

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",  # /dev/shm is small in containers
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-breakpad",
    "--no-first-run",
    "--no-proxy-server",
    "--password-store=basic",
    "--hide-scrollbars",
    "--lang=en-GB",
    "--remote-debugging-address=127.0.0.1",
    "--remote-debugging-port=0",
)

_CODES = {
    "Enter": 13,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Tab": 9,
}


def chromium() -> str:
    """Return the browser, from Debian's package where nobody has installed one."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if not found:
        packages.debian("chromium")
    return found or "/usr/bin/chromium"


@asynccontextmanager
async def a_browser(instance: Instance) -> AsyncIterator["Browser"]:
    """Start a browser with one empty tab; it ends with the block."""
    profile = instance.folder / "browser"
    port = profile / "DevToolsActivePort"
    cache.remove(profile)  # else the port of a former one would be read
    argv = [chromium(), *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    instance.start("browser", argv, env={"TZ": "UTC"})
    try:
        await asyncio.to_thread(instance.wait, "browser", partial(_written, port), 60, "Chromium")
        number, path = port.read_text().split()
        async with ClientSession() as session:
            address = f"ws://127.0.0.1:{number}{path}"
            async with session.ws_connect(address, max_msg_size=0) as socket:
                browser = Browser(socket)
                reading = asyncio.create_task(browser.read(), name="browser")
                try:
                    await browser.attach()
                    yield browser
                finally:
                    reading.cancel()
                    await asyncio.wait([reading])
    finally:
        await asyncio.to_thread(instance.stop, "browser", grace=5)
        await asyncio.to_thread(eventually, partial(_removed, profile), 30)  # its helpers write for a moment longer


def _removed(profile: Path) -> bool:
    with suppress(OSError):
        cache.remove(profile)
    return not profile.exists()


def _written(port: Path) -> bool:
    return port.exists() and len(port.read_text().split()) == 2


class Browser:
    """One tab, and what it complained of and asked for since `forget`."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        """Know no tab yet."""
        self.errors: list[str] = []  # exceptions, errors on the console, violations of the content security policy
        self.requests: list[str] = []
        self._socket = socket
        self._tab = ""
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def attach(self) -> None:
        """Take the tab that is open."""
        targets = (await self.call("Target.getTargets"))["targetInfos"]
        tab = next(it["targetId"] for it in targets if it["type"] == "page")
        self._tab = (await self.call("Target.attachToTarget", targetId=tab, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # else nothing tells that it got the focus

    async def read(self) -> None:
        """Take what the browser says, until it ends."""
        async for message in self._socket:
            if message.type is not WSMsgType.TEXT:
                break
            told = json.loads(message.data)
            if "id" in told:
                self._asked.pop(told["id"]).set_result(told)
            else:
                self._note(told["method"], told["params"])
        for waiting in self._asked.values():
            waiting.set_exception(ConnectionError("the browser has ended"))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in {"error", "assert"}:
            self.errors.append(" ".join(str(it.get("value", it.get("description"))) for it in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    async def call(self, method: str, **given: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        asked = {"id": number, "method": method, "params": given}
        await self._socket.send_json({**asked, "sessionId": self._tab} if self._tab else asked)
        told = await answer
        if "error" in told:
            raise ValueError(f"{method}: {told['error']['message']}")
        result: dict[str, Any] = told["result"]
        return result

    def forget(self) -> None:
        """Forget complaints and requests."""
        self.errors.clear()
        self.requests.clear()

    async def open(self, url: str) -> None:
        """Open an address in a fresh document, and wait until it is loaded."""
        await self.call("Page.navigate", url="about:blank")  # another fragment alone would load nothing
        await self.call("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """Return what an expression is, awaited; an exception in it is one here."""
        told = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if details := told.get("exceptionDetails"):
            raise ValueError(f"{script}: {details.get('exception', {}).get('description', details['text'])}")
        return told["result"].get("value")

    async def wait_for(self, script: str, seconds: float = PATIENCE_SECONDS) -> Any:
        """Return an expression's first value that is true; if there is none, tell what the tab shows."""
        try:
            return await soon(partial(self.evaluate, script), seconds)
        except TimeoutError as error:
            shown = await self.evaluate("[location.href, document.body.innerText.slice(0, 2000)].join()")
            error.add_note(f"{script}\n{shown}\n{self.errors=}\n{self.requests[-20:]=}")
            raise

    async def press(self, key: str) -> None:
        """Press a key and let it go."""
        text = {"Enter": "\r"}.get(key)
        given = {"key": key, "code": key, "windowsVirtualKeyCode": _CODES[key]}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **given, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    async def prefer(self, scheme: str) -> None:
        """Prefer `dark` or `light`."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def size(self, width: int, height: int) -> None:
        """Give the tab another size."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def accessible(self) -> list[tuple[str, str]]:
        """Return role and name of everything that a screen reader is shown."""
        nodes = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
        ]

    async def screenshot(self, path: Path) -> None:
        """Write a picture of what is to be seen."""
        told = await self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(told["data"]))


CONTRASTS = """(() => {
    const parts = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(it => it / 255).map(
        it => it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4
    ).reduce((sum, it, number) => sum + it * [0.2126, 0.7152, 0.0722][number], 0);
    const behind = it => {
        const [r, g, b, alpha = 1] = parts(getComputedStyle(it).backgroundColor);
        return alpha ? [r, g, b] : behind(it.parentElement);
    };
    return [...document.querySelectorAll("body *")].filter(it =>
        it.checkVisibility() && !it.disabled
        && (it.matches("input") || [...it.childNodes].some(child => child.nodeType === 3 && child.data.trim()))
    ).map(it => {
        const [a, b] = [light(parts(getComputedStyle(it).color)), light(behind(it))];
        return [it.outerHTML.slice(0, 80), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
    });
})()"""
