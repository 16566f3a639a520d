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
    "--no-sandbox",  # needs privileges that containers lack, and root cannot use it
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
    """Return the browser's path; Debian's package is installed where no browser is."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if not path:
        packages.debian("chromium")
    return path or "/usr/bin/chromium"


@asynccontextmanager
async def a_browser(instance: Instance) -> AsyncIterator["Browser"]:
    """Start a browser with one empty tab; it ends with the block."""
    profile = instance.folder / "browser"
    port = profile / "DevToolsActivePort"
    cache.remove(profile)  # else the port of the previous browser would be read
    argv = [chromium(), *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    instance.start("browser", argv, env={"TZ": "UTC"})
    try:
        await asyncio.to_thread(instance.wait, "browser", partial(_has_port, port), 60, "Chromium")
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
        await asyncio.to_thread(
            eventually, partial(_removed, profile), 30
        )  # Chromium's helper processes write for a moment longer


def _removed(profile: Path) -> bool:
    with suppress(OSError):
        cache.remove(profile)
    return not profile.exists()


def _has_port(port: Path) -> bool:
    return port.exists() and len(port.read_text().split()) == 2


class Browser:
    """One tab, with its errors and requests since `forget`."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        """Set up the state; `attach` chooses the tab."""
        self.errors: list[str] = []  # exceptions, errors on the console, violations of the content security policy
        self.requests: list[str] = []
        self._socket = socket
        self._tab = ""
        self._numbers = count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def attach(self) -> None:
        """Attach to the open tab."""
        targets = (await self.call("Target.getTargets"))["targetInfos"]
        tab = next(target["targetId"] for target in targets if target["type"] == "page")
        self._tab = (await self.call("Target.attachToTarget", targetId=tab, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # else no element receives a focus event

    async def read(self) -> None:
        """Read the browser's messages until it ends."""
        async for message in self._socket:
            if message.type is not WSMsgType.TEXT:
                break
            payload = json.loads(message.data)
            if "id" in payload:
                self._pending.pop(payload["id"]).set_result(payload)
            else:
                self._note(payload["method"], payload["params"])
        for future in self._pending.values():
            future.set_exception(ConnectionError("the browser has ended"))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "assert"}:
            self.errors.append(
                " ".join(str(argument.get("value", argument.get("description"))) for argument in params["args"])
            )
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        request = {"id": number, "method": method, "params": params}
        await self._socket.send_json({**request, "sessionId": self._tab} if self._tab else request)
        response = await answer
        if "error" in response:
            raise ValueError(f"{method}: {response['error']['message']}")
        result: dict[str, Any] = response["result"]
        return result

    def forget(self) -> None:
        """Forget complaints and requests."""
        self.errors.clear()
        self.requests.clear()

    async def open(self, url: str) -> None:
        """Open an address in a fresh document, and wait until it is loaded."""
        await self.call(
            "Page.navigate", url="about:blank"
        )  # a URL that differs only in its fragment would load nothing
        await self.call("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression, awaited; an exception in it is raised here."""
        response = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if details := response.get("exceptionDetails"):
            raise ValueError(f"{script}: {details.get('exception', {}).get('description', details['text'])}")
        return response["result"].get("value")

    async def wait_for(self, script: str, seconds: float = PATIENCE_SECONDS) -> Any:
        """Return an expression's first value that is true; if none comes, the error shows the tab's text."""
        try:
            return await soon(partial(self.evaluate, script), seconds)
        except TimeoutError as error:
            shown = await self.evaluate("[location.href, document.body.innerText.slice(0, 2000)].join()")
            error.add_note(f"{script}\n{shown}\n{self.errors=}\n{self.requests[-20:]=}")
            raise

    async def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"Enter": "\r"}.get(key)
        key_event = {"key": key, "code": key, "windowsVirtualKeyCode": _CODES[key]}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **key_event, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **key_event)

    async def prefer(self, scheme: str) -> None:
        """Prefer `dark` or `light`."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def size(self, width: int, height: int) -> None:
        """Change the size of the tab."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def accessible(self) -> list[tuple[str, str]]:
        """Return role and name of everything that a screen reader announces."""
        nodes = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
        ]

    async def screenshot(self, path: Path) -> None:
        """Write a picture of the tab."""
        response = await self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(response["data"]))


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
