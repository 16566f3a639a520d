"""The settings of a broker that wants its clients to log in."""

from rota.brokers.rocketmq.wire.signing import Credentials

RIGHT = Credentials("rota", "12345678")


_AUTHENTICATION = "org.apache.rocketmq.auth.authentication.provider"


def settings_of(user: Credentials) -> dict[str, object]:
    """Return the settings of a broker that knows this user."""
    name, password = user.access_key, user.secret_key
    return {
        "authenticationEnabled": True,
        "authenticationProvider": f"{_AUTHENTICATION}.DefaultAuthenticationProvider",
        "authenticationMetadataProvider": f"{_AUTHENTICATION}.LocalAuthenticationMetadataProvider",
        "initAuthenticationUser": f'{{"username":"{name}","password":"{password}"}}',
        "innerClientAuthenticationCredentials": f'{{"accessKey":"{name}","secretKey":"{password}"}}',
    }


SETTINGS = settings_of(RIGHT)
