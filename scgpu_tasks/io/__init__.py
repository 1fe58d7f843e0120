"""Between stores and blocks."""
