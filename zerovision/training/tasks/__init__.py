"""What is learned of the images: of one class each, of several, by comparison, or from a teacher."""
