// Asks the sidecar for messages, works each, and says which went well; run it with `java App.java`.

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
    // Java reads no JSON by itself. Your app has Jackson or Gson; this does for an example.
    static final Pattern MESSAGE = Pattern.compile(
        "\\{\"id\":\"([^\"]+)\",\"topic\":\"([^\"]+)\".*?\"attempt\":(\\d+).*?\"bodyBase64\":\"([^\"]*)\"}");
    static final String SIDECAR = "http://" + Optional.ofNullable(System.getenv("ROTA")).orElse("127.0.0.1:9912");
    static final HttpClient CLIENT = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();

    /** Does what there is to do; an exception means: again, later. */
    static void work(String topic, String attempt, byte[] body) {
        System.out.println(topic + " " + attempt + " " + new String(body));
    }

    static String ask(HttpRequest.Builder request) throws IOException, InterruptedException {
        return CLIENT.send(request.build(), BodyHandlers.ofString()).body();
    }

    static void tell(String path, List<String> ids) throws IOException, InterruptedException {
        if (ids.isEmpty()) return;
        var told = "{\"ids\":[\"" + String.join("\",\"", ids) + "\"]}";
        ask(HttpRequest.newBuilder(URI.create(SIDECAR + path)).POST(HttpRequest.BodyPublishers.ofString(told)));
    }

    public static void main(String[] arguments) throws InterruptedException {
        while (true) {
            try {
                List<String> done = new ArrayList<>(), failed = new ArrayList<>();
                var path = "/v1/messages?max=32&wait=10s";
                var found = MESSAGE.matcher(ask(HttpRequest.newBuilder(URI.create(SIDECAR + path))));
                while (found.find()) {
                    try {
                        work(found.group(2), found.group(3), Base64.getDecoder().decode(found.group(4)));
                        done.add(found.group(1));
                    } catch (RuntimeException error) {
                        failed.add(found.group(1));
                    }
                }
                tell("/v1/acks", done);
                tell("/v1/nacks", failed);
            } catch (IOException error) { // the sidecar is not there yet
                System.err.println(error);
                Thread.sleep(1000);
            }
        }
    }
}
