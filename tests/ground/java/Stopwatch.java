/** Times the same work several times and tells of each; before that, runs that are not told. */
final class Stopwatch {
    private static final int RUNS = 7;
    private static final int WARM_UP_RUNS = 3;
    private static final long WARM_UP_NANOS = 500_000_000L;
    // A new Java compiles while it works: the first work runs longer, so that it is measured compiled.
    private static final long FIRST_WARM_UP_NANOS = 3_000_000_000L;

    private static boolean first = true;

    private Stopwatch() {
    }

    /** Work that runs for one part of a whole is told at what the whole takes: `parts` times as long. */
    static void time(double parts, Runnable work) {
        long least = first ? FIRST_WARM_UP_NANOS : WARM_UP_NANOS;
        first = false;
        long began = System.nanoTime();
        for (int i = 0; i < WARM_UP_RUNS || System.nanoTime() - began < least; i++) {
            work.run();
        }
        for (int i = 0; i < RUNS; i++) {
            long start = System.nanoTime();
            work.run();
            Peer.print("run", "seconds", (System.nanoTime() - start) / 1e9 * parts);
        }
    }
}
