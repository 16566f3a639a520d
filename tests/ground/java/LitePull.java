import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Reads all queues of a topic again and again and tells how long each pass took: nameServer, topic, count (messages in
 * it), passes; batch (messages a pull). With fill=true it writes those messages first, of size bytes; without passes it
 * does only that.
 */
public final class LitePull {
    private static final int BATCH = 100;
    private static final long PATIENCE_MILLIS = 1000;
    private static final double NANOS = 1e9;

    private final Peer peer;
    private final String topic;
    private final int count;
    private long bytes;  // what comes is looked at, so that nothing of it can be left out

    private LitePull(Peer peer) {
        this.peer = peer;
        topic = peer.text("topic");
        count = peer.number("count", 0);
    }

    public static void main(String[] arguments) throws Exception {
        LitePull main = new LitePull(new Peer(arguments));
        if (main.peer.asked("fill")) {
            main.fill();
        }
        if (main.peer.number("passes", 0) > 0) {
            main.read();
        }
        Peer.print("done", "bytes", main.bytes);
        System.exit(0);
    }

    private void fill() throws Exception {
        DefaultMQProducer client = new DefaultMQProducer("filler");
        client.setNamesrvAddr(peer.text("nameServer"));
        client.start();
        List<MessageQueue> queues = client.fetchPublishMessageQueues(topic);
        for (int first = 0; first < count; first += BATCH) {
            List<Message> batch = new ArrayList<>();
            for (int number = first; number < Math.min(first + BATCH, count); number++) {
                batch.add(message(number));
            }
            client.send(batch, queues.get(first / BATCH % queues.size()));  // a broker stores each by itself
        }
        client.shutdown();
    }

    private Message message(int number) {
        byte[] body = new byte[peer.number("size", 1024)];
        Arrays.fill(body, (byte) ' ');
        byte[] start = Integer.toString(number).getBytes(StandardCharsets.US_ASCII);
        System.arraycopy(start, 0, body, 0, start.length);
        Message message = new Message(topic, body);
        message.setKeys(Integer.toString(number));
        return message;
    }

    private void read() throws Exception {
        DefaultLitePullConsumer client = new DefaultLitePullConsumer("lite-pull");
        client.setNamesrvAddr(peer.text("nameServer"));
        client.setPullBatchSize(peer.number("batch", 32));
        client.setAutoCommit(false);
        client.start();
        Collection<MessageQueue> queues = client.fetchMessageQueues(topic);
        client.assign(queues);
        OperatingSystemMXBean process = ManagementFactory.getPlatformMXBean(OperatingSystemMXBean.class);
        for (int pass = 0; pass < peer.number("passes", 0); pass++) {
            long began = System.nanoTime();
            long worked = process.getProcessCpuTime();
            for (MessageQueue queue : queues) {
                client.seekToBegin(queue);  // begins to pull at once, so it is timed
            }
            for (int got = 0; got < count;) {
                got += taken(client.poll(PATIENCE_MILLIS));
            }
            Peer.print("pass", "seconds", (System.nanoTime() - began) / NANOS,
                "cpu", (process.getProcessCpuTime() - worked) / NANOS);
        }
    }

    private int taken(List<MessageExt> messages) {
        for (MessageExt message : messages) {
            bytes += message.getBody().length;
        }
        return messages.size();
    }
}
