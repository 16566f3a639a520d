"""The pure judgement of an offset history: KeepingUp, Slow, Stalled, Stopped, Rewound."""
