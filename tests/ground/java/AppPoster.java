import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.time.Duration;
import java.time.Instant;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Posts messages to an app over kept-alive connections, as Rota's sidecar does with each single message: a CloudEvent in
 * binary mode with the same headers, except the generation of an assignment. Values are not escaped.
 */
final class AppPoster {
    private static final Duration TIMEOUT = Duration.ofSeconds(30);
    private static final int MIN_SUCCESS = 200;
    private static final int MIN_FAILURE = 300;

    private final HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
    private final URI app;

    AppPoster(String url) {
        app = URI.create(url);
    }

    /** Posts one message; false without a response in time whose status is 2xx. */
    boolean post(MessageExt message) {
        try {
            int status = client.send(request(message), BodyHandlers.discarding()).statusCode();
            return status >= MIN_SUCCESS && status < MIN_FAILURE;
        } catch (IOException failed) {
            return false;
        } catch (InterruptedException stop) {
            Thread.currentThread().interrupt();
            return false;
        }
    }

    private HttpRequest request(MessageExt message) {
        HttpRequest.Builder request = HttpRequest.newBuilder(app).timeout(TIMEOUT)
            .POST(BodyPublishers.ofByteArray(message.getBody()))
            .setHeader("ce-specversion", "1.0")
            .setHeader("ce-id", message.getMsgId())
            .setHeader("ce-source", "/rocketmq/" + message.getTopic())
            .setHeader("ce-type", "dev.rota.rocketmq.message")
            .setHeader("ce-time", Instant.ofEpochMilli(message.getBornTimestamp()).toString())
            .setHeader("ce-rocketmqtopic", message.getTopic())
            .setHeader("ce-rocketmqbroker", message.getBrokerName())
            .setHeader("ce-rocketmqqueue", Integer.toString(message.getQueueId()))
            .setHeader("ce-rocketmqoffset", Long.toString(message.getQueueOffset()))
            .setHeader("ce-rotaattempt", Integer.toString(message.getReconsumeTimes() + 1))
            .setHeader("content-type", "application/octet-stream");
        if (message.getTags() != null) {
            request.setHeader("ce-rocketmqtag", message.getTags());
        }
        if (message.getKeys() != null) {
            request.setHeader("ce-rocketmqkeys", message.getKeys());
        }
        return request.build();
    }
}
