"""Proxies of the environment, as kubectl reads them."""

import pytest

from rota.kube.client.login.env_proxy import proxy_for
from rota.kube.client.login.kubeconfig import LoginError

PROXY = "http://proxy:3128"


@pytest.mark.parametrize(
    ("server", "environment", "proxy"),
    [
        ("https://api:6443", {}, None),
        ("https://api:6443", {"HTTPS_PROXY": PROXY}, PROXY),
        ("https://api:6443", {"https_proxy": "proxy:3128"}, PROXY),
        ("https://api:6443", {"HTTP_PROXY": PROXY}, None),
        ("http://api:8080", {"HTTP_PROXY": PROXY}, PROXY),
        ("https://127.0.0.1:6443", {"HTTPS_PROXY": PROXY}, None),
        ("https://[::1]:6443", {"HTTPS_PROXY": PROXY}, None),
        ("https://localhost:6443", {"HTTPS_PROXY": PROXY}, None),
        ("https://api.shop.example:6443", {"HTTPS_PROXY": PROXY, "NO_PROXY": "other, .shop.example"}, None),
        ("https://shop.example:6443", {"HTTPS_PROXY": PROXY, "NO_PROXY": ".shop.example,*.shop.example"}, PROXY),
        ("https://api:6443", {"HTTPS_PROXY": PROXY, "NO_PROXY": "api:6443"}, None),
        ("https://api:6443", {"HTTPS_PROXY": PROXY, "NO_PROXY": "api:443"}, PROXY),
        ("https://10.2.3.4:6443", {"HTTPS_PROXY": PROXY, "NO_PROXY": "10.2.3.4:6443"}, None),
        ("https://[2001:db8::1]:6443", {"HTTPS_PROXY": PROXY, "NO_PROXY": "2001:db8::/32"}, None),
        ("https://api.shop.example:6443", {"HTTPS_PROXY": PROXY, "no_proxy": "shop.example"}, None),
        ("https://myshop.example:6443", {"HTTPS_PROXY": PROXY, "NO_PROXY": "shop.example"}, PROXY),
        ("https://10.2.3.4:6443", {"HTTPS_PROXY": PROXY, "NO_PROXY": "10.0.0.0/8"}, None),
        ("https://10.2.3.4:6443", {"HTTPS_PROXY": PROXY, "NO_PROXY": "10.2.3.4"}, None),
        ("https://11.2.3.4:6443", {"HTTPS_PROXY": PROXY, "NO_PROXY": "10.0.0.0/8,"}, PROXY),
        ("https://api:6443", {"HTTPS_PROXY": PROXY, "NO_PROXY": "*"}, None),
    ],
)
def test_login_uses_the_proxy_of_the_environment(server: str, environment: dict[str, str], proxy: str | None) -> None:
    assert proxy_for(server, environment) == proxy


def test_login_with_a_socks_proxy_is_one_sentence() -> None:
    with pytest.raises(LoginError, match="The proxy in HTTPS_PROXY is not supported; write it as http://HOST:PORT"):
        proxy_for("https://api:6443", {"HTTPS_PROXY": "socks5://me:secret@127.0.0.1"})
