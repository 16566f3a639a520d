import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.coordinator.group.api.assignor.GroupSpec;
import org.apache.kafka.coordinator.group.api.assignor.MemberAssignment;
import org.apache.kafka.coordinator.group.api.assignor.PartitionAssignor;
import org.apache.kafka.coordinator.group.api.assignor.SubscribedTopicDescriber;
import org.apache.kafka.coordinator.group.api.assignor.SubscriptionType;
import org.apache.kafka.coordinator.group.assignor.RangeAssignor;
import org.apache.kafka.coordinator.group.assignor.UniformAssignor;
import org.apache.kafka.coordinator.group.modern.Assignment;
import org.apache.kafka.coordinator.group.modern.GroupSpecImpl;
import org.apache.kafka.coordinator.group.modern.MemberSubscriptionAndAssignmentImpl;

/**
 * Times Kafka's server-side assignors: assignor (uniform, range), works (several, with commas between them, each
 * members:topics:queues:change, with so many queues a topic; full: nobody owns anything; joins, leaves: one member
 * does, of a group that is assigned). As in Kafka's own benchmark all members subscribe to all topics. Topics are given
 * as plain sets of ids, which is the least work for the assignor: in the coordinator they are looked up by name.
 */
public final class Assignors {
    private final PartitionAssignor assignor;
    private final SubscribedTopicDescriber topics;
    private final Set<Uuid> all;
    private Map<String, MemberAssignment> answer = Map.of();

    private Assignors(PartitionAssignor assignor, int topics, int queues) {
        this.assignor = assignor;
        this.topics = sized(queues);
        all = new HashSet<>(Stream.generate(Uuid::randomUuid).limit(topics).toList());
    }

    public static void main(String[] arguments) {
        Peer peer = new Peer(arguments);
        PartitionAssignor assignor = peer.text("assignor").equals("uniform") ? new UniformAssignor() : new RangeAssignor();
        for (String work : peer.text("works").split(",")) {
            String[] parts = work.split(":");
            new Assignors(assignor, Integer.parseInt(parts[1]), Integer.parseInt(parts[2]))
                .run(Integer.parseInt(parts[0]), parts[3]);
        }
    }

    private static SubscribedTopicDescriber sized(int queues) {
        return new SubscribedTopicDescriber() {
            @Override
            public int numPartitions(Uuid topic) {
                return queues;
            }

            @Override
            public Set<String> racksForPartition(Uuid topic, int partition) {
                return Set.of();
            }
        };
    }

    private void run(int count, String change) {
        Map<String, MemberAssignment> before = Map.of();
        int after = count;
        if (!change.equals("full")) {
            before = assign(group(members(count), before));
            after += change.equals("joins") ? 1 : -1;
        }
        GroupSpec group = group(members(after), before);
        Stopwatch.time(1, () -> answer = assign(group));
        tell(before);
    }

    private Map<String, MemberAssignment> assign(GroupSpec group) {
        return assignor.assign(group, topics).members();
    }

    private static List<String> members(int count) {
        return IntStream.range(0, count).mapToObj(number -> "orders-7d9f-%05d".formatted(number)).toList();
    }

    private GroupSpec group(List<String> members, Map<String, MemberAssignment> before) {
        Map<String, MemberSubscriptionAndAssignmentImpl> specs = new HashMap<>();
        Map<Uuid, Map<Integer, String>> owners = new HashMap<>();
        for (String member : members) {
            Map<Uuid, Set<Integer>> share = owned(before, member);
            specs.put(member, new MemberSubscriptionAndAssignmentImpl(
                Optional.empty(), Optional.empty(), all, new Assignment(share)));
            share.forEach((topic, queues) -> queues.forEach(
                queue -> owners.computeIfAbsent(topic, unknown -> new HashMap<>()).put(queue, member)));
        }
        return new GroupSpecImpl(specs, SubscriptionType.HOMOGENEOUS, owners);
    }

    private static Map<Uuid, Set<Integer>> owned(Map<String, MemberAssignment> by, String member) {
        return by.containsKey(member) ? by.get(member).partitions() : Map.of();
    }

    /** Tells how many queues went to somebody who did not own them. */
    private void tell(Map<String, MemberAssignment> before) {
        long moved = 0;
        for (String member : answer.keySet()) {
            for (Map.Entry<Uuid, Set<Integer>> share : answer.get(member).partitions().entrySet()) {
                Set<Integer> kept = owned(before, member).getOrDefault(share.getKey(), Set.of());
                moved += share.getValue().stream().filter(queue -> !kept.contains(queue)).count();
            }
        }
        Peer.print("answer", "moved", moved);
    }
}
