"""The pass, one stage per file: normalise -> find -> rewrite -> lower -> report. Plans come from the scheme."""
