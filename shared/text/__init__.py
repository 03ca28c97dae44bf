"""Token ids to text: incremental, replayable from ids alone, never taking back a character already handed out."""
