"""What a member does about what it hears: decides, without IO."""
