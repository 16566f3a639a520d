// Requests messages from the sidecar, processes each, and acknowledges or rejects it; run it with `java App.java`.

import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Optional;
import java.util.regex.Pattern;

public class App {
    // Java has no JSON parser. Use Jackson or Gson in your app; a pattern is enough for an example.
    static final Pattern MESSAGE = Pattern.compile(
        "\\{\"id\":\"([^\"]+)\",\"topic\":\"([^\"]+)\".*?\"attempt\":(\\d+).*?\"bodyBase64\":\"([^\"]*)\"}");
    static final String SIDECAR = "http://" + Optional.ofNullable(System.getenv("ROTA")).orElse("127.0.0.1:9912");
    static final HttpClient CLIENT = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();

    /** Processes a message; after an exception it is retried later. */
    static void process(String topic, String attempt, byte[] body) {
        System.out.println(topic + " " + attempt + " " + new String(body));
    }

    static String send(HttpRequest.Builder request) throws IOException, InterruptedException {
        return CLIENT.send(request.build(), BodyHandlers.ofString()).body();
    }

    static void sendIds(String path, List<String> ids) throws IOException, InterruptedException {
        if (ids.isEmpty()) return;
        var body = "{\"ids\":[\"" + String.join("\",\"", ids) + "\"]}";
        send(HttpRequest.newBuilder(URI.create(SIDECAR + path)).POST(HttpRequest.BodyPublishers.ofString(body)));
    }

    public static void main(String[] arguments) throws InterruptedException {
        while (true) {
            try {
                List<String> done = new ArrayList<>(), failed = new ArrayList<>();
                var path = "/v1/messages?max=32&wait=10s";
                var messages = MESSAGE.matcher(send(HttpRequest.newBuilder(URI.create(SIDECAR + path))));
                while (messages.find()) {
                    try {
                        process(messages.group(2), messages.group(3), Base64.getDecoder().decode(messages.group(4)));
                        done.add(messages.group(1));
                    } catch (RuntimeException error) {
                        failed.add(messages.group(1));
                    }
                }
                sendIds("/v1/acks", done);
                sendIds("/v1/nacks", failed);
            } catch (IOException error) { // the sidecar has not started yet, or was restarted
                System.err.println(error);
                Thread.sleep(1000);
            }
        }
    }
}
