import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.consumer.AllocateMessageQueueStrategy;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMachineRoomNearby;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMachineRoomNearby.MachineRoomResolver;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragelyByCircle;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueByMachineRoom;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Times the reference client's strategies: strategy (its name), queues and members (files, sorted), calls, ask (a
 * member whose share is told). A fleet decides by one call a member; a run makes some of them, going on
 * through the members in a random order, and is told at what all of them take.
 */
public final class Strategies {
    private final List<MessageQueue> queues = new ArrayList<>();
    private final List<String> members = new ArrayList<>();
    private final Map<String, String> roomOfMember = new HashMap<>();
    private final AllocateMessageQueueStrategy strategy;
    private int next;
    private long given;  // what comes of a call is used, so that the compiler cannot leave the call out

    private Strategies(Peer peer) throws IOException {
        for (String line : Files.readAllLines(Path.of(peer.text("queues")))) {
            String[] parts = line.split("\t");
            queues.add(new MessageQueue(parts[0], parts[1], Integer.parseInt(parts[2])));
        }
        for (String line : Files.readAllLines(Path.of(peer.text("members")))) {
            String[] parts = line.split("\t");
            members.add(parts[0]);
            roomOfMember.put(parts[0], parts[1]);
        }
        strategy = strategy(peer.text("strategy"));
    }

    public static void main(String[] arguments) throws IOException {
        Peer peer = new Peer(arguments);
        new Strategies(peer).run(peer.number("calls", 1), peer.text("ask"));
    }

    private AllocateMessageQueueStrategy strategy(String name) {
        return switch (name) {
            case "AVG" -> new AllocateMessageQueueAveragely();
            case "AVG_BY_CIRCLE" -> new AllocateMessageQueueAveragelyByCircle();
            case "CONSISTENT_HASH" -> new AllocateMessageQueueConsistentHash();
            case "MACHINE_ROOM" -> byMachineRoom();
            case "MACHINE_ROOM_NEARBY" ->
                new AllocateMachineRoomNearby(new AllocateMessageQueueAveragely(), rooms());
            default -> throw new IllegalArgumentException("unknown strategy " + name);
        };
    }

    private AllocateMessageQueueStrategy byMachineRoom() {
        AllocateMessageQueueByMachineRoom byRoom = new AllocateMessageQueueByMachineRoom();
        byRoom.setConsumeridcs(Set.copyOf(roomOfMember.values()));
        return byRoom;
    }

    /** Looks rooms up, as ours does; a broker's is written in its name. */
    private MachineRoomResolver rooms() {
        Map<String, String> roomOfBroker = queues.stream().map(MessageQueue::getBrokerName).distinct()
            .collect(Collectors.toMap(broker -> broker, broker -> broker.split("@")[0]));
        return new MachineRoomResolver() {
            @Override
            public String brokerDeployIn(MessageQueue queue) {
                return roomOfBroker.get(queue.getBrokerName());
            }

            @Override
            public String consumerDeployIn(String client) {
                return roomOfMember.get(client);
            }
        };
    }

    private void run(int calls, String ask) {
        List<String> order = new ArrayList<>(members);
        Collections.shuffle(order, new Random(7));
        Stopwatch.time((double) members.size() / calls, () -> {
            for (int i = 0; i < calls; i++) {
                given += share(order.get(next++ % order.size())).size();
            }
        });
        String share = share(ask).stream().sorted().map(queue -> queue.getBrokerName() + "/" + queue.getQueueId())
            .collect(Collectors.joining(" "));
        Peer.print("answer", "queues", share, "given", given);
    }

    private List<MessageQueue> share(String member) {
        return strategy.allocate("group", member, queues, members);
    }
}
