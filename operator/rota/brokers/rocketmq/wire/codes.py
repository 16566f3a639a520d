"""Protocol constants: request codes, response codes, permission bits, the master's broker id."""

from enum import IntEnum


class RequestCode(IntEnum):
    """Request codes, with the protocol's names."""

    PULL_MESSAGE = 11
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    GET_CONSUMER_LIST_BY_GROUP = 38
    NOTIFY_CONSUMER_IDS_CHANGED = 40  # sent by the broker
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    CHECK_CLIENT_CONFIG = 46
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_CONSUME_STATS = 208
    RESET_CONSUMER_CLIENT_OFFSET = 220  # sent by the broker
    GET_CONSUMER_STATUS_FROM_CLIENT = 221  # sent by the broker
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    GET_CONSUMER_RUNNING_INFO = 307  # sent by clients and by the broker
    SEND_MESSAGE_V2 = 310
    GET_TOPIC_CONFIG = 351
    GET_SUBSCRIPTIONGROUP_CONFIG = 352
    QUERY_ASSIGNMENT = 400
    SET_MESSAGE_REQUEST_MODE = 401


class ResponseCode(IntEnum):
    """Response codes of brokers and name servers."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    FLUSH_DISK_TIMEOUT = 10  # this and the next two: the message is stored, but flush or replication is unconfirmed
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    INVALID_PARAMETER = 29
    CONSUMER_NOT_ONLINE = 206
    FLOW_CONTROL = 215
    GO_AWAY = 1500


# Responses to a send after which the message is stored.
STORED_CODES = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
    }
)

# Requests that are not idempotent: a caller must not retry one that the broker may have executed. A repeated pull would
# store the offset that it carries after a higher one.
NOT_IDEMPOTENT = frozenset(
    {
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        RequestCode.PULL_MESSAGE,
    }
)

MASTER_ID = 0  # the broker id of a master
# Bits in the permissions of a topic's queues.
READ_PERMISSION = 4
WRITE_PERMISSION = 2
READ_WRITE = READ_PERMISSION | WRITE_PERMISSION
