"""Who trains, until when, and what counts: decides, without IO."""
