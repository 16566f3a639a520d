import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.MessageQueueSelector;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends numbered messages, one after the other: nameServer, topic, count; optionally first, size (bytes), rate (a second),
 * tags (a,b: in turn), sharded=true (number modulo queues), poll (of routes, milliseconds), stamped=true (the time, in
 * milliseconds, follows the number in the body). A message that is refused is sent again until it is taken.
 */
public final class Producer {
    private static final MessageQueueSelector BY_NUMBER = (queues, message, number) -> {
        List<MessageQueue> sorted = queues.stream().sorted().toList();
        return sorted.get((int) number % sorted.size());
    };

    private static final long REPORT_NANOS = 1_000_000_000L;

    private final Peer peer;
    private final DefaultMQProducer client = new DefaultMQProducer("producer-" + ProcessHandle.current().pid());

    private Producer(Peer peer) {
        this.peer = peer;
    }

    public static void main(String[] arguments) throws Exception {
        new Producer(new Peer(arguments)).run();
        System.exit(0);
    }

    private void run() throws Exception {
        client.setNamesrvAddr(peer.text("nameServer"));
        client.setPollNameServerInterval(peer.number("poll", 30_000));
        client.start();
        int first = peer.number("first", 0);
        int count = peer.number("count", 1);
        long began = System.nanoTime();
        long reported = began;
        for (int i = 0; i < count; i++) {
            await(began, i);
            send(message(first + i), first + i);
            if (System.nanoTime() - reported > REPORT_NANOS) {
                reported = System.nanoTime();
                Peer.print("sent", "count", i + 1);
            }
        }
        Peer.print("done", "count", count, "seconds", (System.nanoTime() - began) / 1e9);
        client.shutdown();
    }

    private void await(long began, int i) throws InterruptedException {
        int rate = peer.number("rate", 0);
        long ahead = rate == 0 ? 0 : began + i * 1_000_000_000L / rate - System.nanoTime();
        if (ahead > 0) {
            Thread.sleep(ahead / 1_000_000, (int) (ahead % 1_000_000));
        }
    }

    private Message message(int number) {
        String words = peer.asked("stamped") ? number + " " + System.currentTimeMillis() : Integer.toString(number);
        byte[] start = words.getBytes(StandardCharsets.US_ASCII);
        byte[] body = new byte[Math.max(peer.number("size", 100), Math.max(start.length + 1, 11))];
        Arrays.fill(body, (byte) ' ');
        System.arraycopy(start, 0, body, 0, start.length);
        Message message = new Message(peer.text("topic"), body);
        message.setKeys(Integer.toString(number));
        if (!peer.text("tags").isEmpty()) {
            String[] tags = peer.text("tags").split(",");
            message.setTags(tags[number % tags.length]);
        }
        return message;
    }

    private void send(Message message, int number) throws InterruptedException {
        while (true) {
            try {
                if (peer.asked("sharded")) {
                    client.send(message, BY_NUMBER, number);
                } else {
                    client.send(message);
                }
                return;
            } catch (InterruptedException stop) {
                throw stop;
            } catch (Exception refused) {
                Peer.print("refused", "number", number, "error", refused.toString());
                Thread.sleep(100);
            }
        }
    }
}
