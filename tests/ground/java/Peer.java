import java.util.HashMap;
import java.util.Map;

/** What all peers share: arguments written name=value, and lines of JSON for whoever started them. */
final class Peer {
    private final Map<String, String> given = new HashMap<>();

    Peer(String[] arguments) {
        for (String argument : arguments) {
            String[] parts = argument.split("=", 2);
            given.put(parts[0], parts[1]);
        }
    }

    String text(String name) {
        return given.getOrDefault(name, "");
    }

    String text(String name, String otherwise) {
        return text(name).isEmpty() ? otherwise : text(name);
    }

    int number(String name, int otherwise) {
        return text(name).isEmpty() ? otherwise : Integer.parseInt(text(name));
    }

    boolean asked(String name) {
        return text(name).equals("true");
    }

    /** Prints one line: the event, when it was in microseconds, then pairs of name and value. */
    static void print(String event, Object... pairs) {
        StringBuilder line = new StringBuilder("{\"event\":").append(json(event));
        line.append(",\"at\":").append(now());
        for (int i = 0; i < pairs.length; i += 2) {
            line.append(',').append(json(pairs[i])).append(':').append(json(pairs[i + 1]));
        }
        System.out.println(line.append('}'));
    }

    static long now() {
        java.time.Instant now = java.time.Instant.now();
        return now.getEpochSecond() * 1_000_000 + now.getNano() / 1_000;
    }

    private static String json(Object value) {
        if (value instanceof Number || value instanceof Boolean) {
            return value.toString();
        }
        return '"' + value.toString().replace("\\", "\\\\").replace("\"", "\\\"").replace("\n", " ") + '"';
    }
}
