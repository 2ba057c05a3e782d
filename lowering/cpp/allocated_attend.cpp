// Attention of a few query tokens per sample, for keys and values with per-channel bit widths and pages of the same
// tokens. Needs rings.h and allocated_parts.h.
namespace {

// The pages of keys or of values of all heads, and their fitted tensors.
template <typename Fields>
struct Side {
    const uint8_t* pages;
    int64_t room;
    const Scale* basis;
    const Fields* fields;
    int64_t fields_of_head, fitted;  // fitted: 1 if per sample, 0 if samples share the model's

    // The side of one head. heads: number of heads per sample. bytes: of a page.
    Side of(int64_t head, int64_t heads, int64_t bytes) const {
        const int64_t own = fitted ? head : head % heads;
        const int64_t pool = SHARED ? head / heads : head;
        return {
            pages + pool * room * bytes, room, basis + own * HEAD * BLOCK, fields + own * fields_of_head,
            fields_of_head, fitted};
    }
};

// The rotations of the tokens before the middle of a page, relative to it. all_cos, all_sin: [PAGE, row], the rotations
// of PAGE consecutive tokens.
struct RelativeRotations {
    float cos[HEAD / 2 * keys::BEFORE_MIDDLE] = {}, sin[HEAD / 2 * keys::BEFORE_MIDDLE] = {};

    RelativeRotations(const Token* all_cos, const Token* all_sin, int64_t row, int pairs) {
        const Token *middle_cos = all_cos + PAGE / 2 * row, *middle_sin = all_sin + PAGE / 2 * row;
        for (int i = 0; i < pairs; i++) {
            const float c = number(middle_cos[i]), s = number(middle_sin[i]), norm = c * c + s * s;
            for (int t = 0; t < PAGE / 2; t++) {
                const float token_cos = number(all_cos[t * row + i]), token_sin = number(all_sin[t * row + i]);
                cos[i * keys::BEFORE_MIDDLE + t] = (token_cos * c + token_sin * s) / norm;
                sin[i * keys::BEFORE_MIDDLE + t] = (token_sin * c - token_cos * s) / norm;
            }
        }
    }
};

}  // namespace

// All samples have the same number of tokens: n stored ones, packed pages of which are packed, and present ones of the
// call. For queries, tokens and causal see attend_codes.cpp. all_cos, all_sin: [samples, rows, row], the rotations of
// PAGE consecutive tokens, then of the middle tokens of pages. center: [samples, heads, HEAD], used if centered is 1. For
// other arguments see allocated_scores.cpp and rings.h.
extern "C" void kernel(
    const uint8_t* q, uint8_t* out, const uint8_t* key_pages, const uint8_t* key_basis, const keys::Fields* key_fields,
    const uint8_t* value_pages, const uint8_t* value_basis, const values::Fields* value_fields,
    const uint8_t* key_ring, const uint8_t* value_ring, const uint8_t* key_new, const uint8_t* value_new,
    const uint8_t* all_cos, const uint8_t* all_sin, const uint8_t* center, const float* table, int64_t samples,
    int64_t heads, int64_t n, int64_t present, int64_t packed, int64_t key_room, int64_t value_room, int64_t rows,
    int64_t row, int64_t pairs, int64_t interleaved, int64_t centered, int64_t fitted, int64_t count, int64_t tokens,
    int64_t causal, const uint8_t* mask, int64_t mask_kind, int64_t mask_of_sample, int64_t mask_of_head,
    int64_t mask_of_token, const float* sinks, int64_t with_sinks, float* lse, int64_t with_lse,
    int64_t threads, float scale
) {
    const Mask of_call = {mask, mask_kind, mask_of_sample, mask_of_head, mask_of_token};
    const Queries queries = {count, tokens, causal, of_call, with_sinks ? sinks : nullptr, with_lse ? lse : nullptr};
    const Side<keys::Fields> of_keys = {
        key_pages, key_room, (const Scale*)key_basis, key_fields, keys::PLACES_OF_HEAD, fitted};
    const Side<values::Fields> of_values = {
        value_pages, value_room, (const Scale*)value_basis, value_fields, values::PLACES_OF_HEAD, fitted};
    const int64_t fitted_samples = fitted ? samples : 1;
    const keys::Layouts key_layouts(key_fields, fitted_samples, heads);
    const values::Layouts value_layouts(value_fields, fitted_samples, heads);
    const Rings rings = {
        (const Token*)key_ring, (const Token*)value_ring, (const Token*)key_new, (const Token*)value_new, n, present};
    const int64_t blocks = queries.blocks(), tasks = samples * heads * blocks;
    const int64_t wanted = threads > 1 ? (3 * threads + tasks - 1) / tasks : 1;
    const int64_t parts = std::max<int64_t>(1, std::min(wanted, packed / 8));
    const Token *cos = (const Token*)all_cos, *sin = (const Token*)all_sin;
    std::vector<RelativeRotations> relative_rotations;
    for (int64_t b = 0; b < samples; b++)
        relative_rotations.emplace_back(cos + b * rows * row, sin + b * rows * row, row, centered ? pairs : 0);
    std::vector<PartResult> found(tasks * parts);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < tasks * parts; i++) {
        const int64_t block = i / parts % blocks, h = i / parts / blocks, part = i % parts, b = h / heads;
        const int64_t sample = fitted ? b : 0;
        const keys::Layout layout = key_layouts.of(sample, h % heads);
        const auto key_side = of_keys.of(h, heads, layout.bytes);
        float mean[HEAD];
        if (centered) to_floats<HEAD>((const Scale*)center + (fitted ? h : h % heads) * HEAD, mean);
        const keys::PageRope<Token> rope = {
            cos + (b * rows + PAGE) * row, sin + (b * rows + PAGE) * row, row, (int)pairs, (int)interleaved,
            relative_rotations[b].cos, relative_rotations[b].sin};
        const keys::Head head(key_side.basis, key_side.fields, table + keys::GAINS, layout);
        keys::Scorer<Token> scorer(head, rope, centered ? mean : nullptr);
        Part own = queries.start<Part>((const Token*)q + h * count * HEAD, b, h % heads, block, n + present, scale);
        const auto score = [&](int64_t begin, int64_t end, float* scores, int64_t apart) {
            scorer(own.q, key_side.pages, key_side.room, begin, end, table, scores, apart);
        };
        const values::Layout of_value = value_layouts.of(sample, h % heads);
        const auto value_side = of_values.of(h, heads, of_value.bytes);
        own.add_pages(value_side, of_value, part * packed / parts, (part + 1) * packed / parts, table, score);
        if (part + 1 == parts) own.add_exact_tokens(Exact{rings, h}, packed, n + present);
        found[i].keep(own);
    }
    for (int64_t i = 0; i < tasks; i++) {
        const int64_t block = i % blocks, h = i / blocks;
        const auto own = of_values.of(h, heads, 0);  // of no page
        const int64_t row = h * count + block * QUERIES;
        const auto sink = [&](int r) { return queries.sink(h % heads, block * QUERIES + r); };
        merge(
            found.data() + i * parts, parts, own.basis, own.fields, table, (Token*)out + row * HEAD,
            queries.in_block(block), sink, queries.lse ? queries.lse + row : nullptr
        );
    }
}
