"""What a user runs beside training: doctor, bench, report, export."""
