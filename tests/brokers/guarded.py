"""The settings of a broker that wants its clients to log in."""

from rota.brokers.rocketmq.wire.signing import Credentials

RIGHT = Credentials("rota", "12345678")


_AUTHENTICATION = "org.apache.rocketmq.auth.authentication.provider"


SETTINGS = {
    "authenticationEnabled": True,
    "authenticationProvider": f"{_AUTHENTICATION}.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": f"{_AUTHENTICATION}.LocalAuthenticationMetadataProvider",
    "initAuthenticationUser": '{"username":"rota","password":"12345678"}',
    "innerClientAuthenticationCredentials": '{"accessKey":"rota","secretKey":"12345678"}',
}
