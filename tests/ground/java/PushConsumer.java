import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Set;
import java.util.concurrent.atomic.LongAdder;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;

/**
 * Consumes and tells of every message and every rebalance: nameServer, group, topic; optionally expression, model
 * (CLUSTERING, BROADCASTING), orderly=true, strategy (AVG, AVG_BY_CIRCLE, CONSISTENT_HASH), instance (the client id is
 * ip@instance), from=last, threads, poll (of routes, milliseconds), work (milliseconds a message), failEvery (n: every nth
 * number fails the first time), quiet=true (looks at no message, and tells ten times a second how many there were),
 * batch (of messages for one call of the listener), post (URL of an app: each message is posted there, fails unless the
 * app responds 2xx, and with quiet=true is counted then).
 */
public final class PushConsumer {
    private static final long TELL_MILLIS = 100;

    private final Peer peer;
    private final LongAdder count = new LongAdder();
    private final AppPoster app;

    private PushConsumer(Peer peer) {
        this.peer = peer;
        app = peer.text("post").isEmpty() ? null : new AppPoster(peer.text("post"));
    }

    public static void main(String[] arguments) throws Exception {
        new PushConsumer(new Peer(arguments)).run();
    }

    private void run() throws Exception {
        DefaultMQPushConsumer client = new DefaultMQPushConsumer(peer.text("group"));
        client.setNamesrvAddr(peer.text("nameServer"));
        client.setMessageModel(MessageModel.valueOf(peer.text("model", "CLUSTERING")));
        client.setInstanceName(peer.text("instance", "DEFAULT"));
        client.setPollNameServerInterval(peer.number("poll", 30_000));
        client.setConsumeThreadMin(peer.number("threads", 20));
        client.setConsumeThreadMax(peer.number("threads", 20));
        client.setConsumeFromWhere(peer.text("from").equals("last")
            ? ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET : ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        setStrategy(client);
        client.subscribe(peer.text("topic"), peer.text("expression", "*"));
        client.setMessageQueueListener((topic, all, mine) -> tellRebalance(topic, all, mine));
        if (peer.asked("orderly")) {
            client.registerMessageListener((MessageListenerOrderly) (messages, context) -> taken(messages)
                ? ConsumeOrderlyStatus.SUCCESS : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT);
        } else {
            client.registerMessageListener((MessageListenerConcurrently) (messages, context) -> taken(messages)
                ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER);
        }
        client.setConsumeMessageBatchMaxSize(peer.number("batch", 1));
        client.start();
        Runtime.getRuntime().addShutdownHook(new Thread(client::shutdown));
        Peer.print("started", "client", client.buildMQClientId());
        while (peer.asked("quiet")) {
            Thread.sleep(TELL_MILLIS);
            Peer.print("count", "count", count.sum());
        }
    }

    private void setStrategy(DefaultMQPushConsumer client) {
        switch (peer.text("strategy", "AVG")) {
            case "AVG" -> { }  // the client's default
            case "AVG_BY_CIRCLE" -> client.setAllocateMessageQueueStrategy(new AllocateMessageQueueAveragelyByCircle());
            case "CONSISTENT_HASH" -> client.setAllocateMessageQueueStrategy(new AllocateMessageQueueConsistentHash());
            default -> throw new IllegalArgumentException("unknown strategy " + peer.text("strategy"));
        }
    }

    private void tellRebalance(String topic, Set<MessageQueue> all, Set<MessageQueue> mine) {
        String queues = mine.stream().sorted().map(queue -> queue.getBrokerName() + ":" + queue.getQueueId())
            .collect(Collectors.joining(" "));
        Peer.print("rebalance", "topic", topic, "all", all.size(), "queues", queues);
    }

    private boolean taken(List<MessageExt> messages) {
        boolean all = true;
        if (app != null) {
            for (MessageExt message : messages) {
                all &= app.post(message);
            }
        } else if (!peer.asked("quiet")) {
            for (MessageExt message : messages) {
                all &= taken(message);
            }
        }
        if (all) {
            count.add(messages.size());
        }
        return all;
    }

    private boolean taken(MessageExt message) {
        int number = Integer.parseInt(new String(message.getBody(), StandardCharsets.US_ASCII).split(" ", 2)[0]);
        Peer.print("message", "topic", message.getTopic(), "broker", message.getBrokerName(),
            "queue", message.getQueueId(), "offset", message.getQueueOffset(), "number", number,
            "reconsumeTimes", message.getReconsumeTimes(), "born", message.getBornTimestamp());
        try {
            Thread.sleep(peer.number("work", 0));
        } catch (InterruptedException stop) {
            Thread.currentThread().interrupt();
        }
        int every = peer.number("failEvery", 0);
        return every == 0 || number % every != 0 || message.getReconsumeTimes() > 0;
    }
}
