// Attention of a few query tokens over packed and exact tokens. Needs channel_codes.h or token_codes.h.
//
// A part of the context of a KV head is processed in pieces of at most one page: scores, then weights, then values. A
// Context knows where the data is: pool(which, page) returns the codes, scales and zero points of a page of keys (which
// = 0, 1, 2) and of values (3, 4, 5). In addition it has the functions that RunningSoftmax::add_all_exact needs, and is
// ReadBy.
namespace {

constexpr int PAGES_PER_PART = 16;

// What the codes of all heads are read with. Where a code stands for several channels, those of one place in all codes
// are next to each other ("code order").
struct Reading {
    enum Given { IN_CODE_ORDER = 1, TO_CODES = 2, FROM_CODES = 4, CENTER = 8 };

    std::vector<float> turned;  // queries in code order, multiplied by the scale of scores, [heads, queries, HEAD]
    std::vector<float> shifts;  // what is added to their scores, [heads, queries]
    const float *key_points, *value_points;  // of grids, [DIM, POINTS]
    const float* from_codes;                 // the matrix that brings values to channels, [HEAD, HEAD], or null

    // q: [heads, queries, HEAD], with the heads of all samples. given: which of the other arguments are there, as a sum
    // of Given. to_codes: the matrix that brings queries to code order and rotates them as keys are. center: what was
    // subtracted from keys, [heads, HEAD].
    Reading(
        const Token* q, float scale, int64_t heads, int64_t queries, int64_t given, const float* key_points,
        const float* value_points, const float* to_codes, const float* from_codes, const Scale* center, int64_t threads
    ) : key_points(key_points), value_points(value_points), from_codes(given & FROM_CODES ? from_codes : nullptr) {
        if (!(given & IN_CODE_ORDER)) return;
        turned.resize(heads * queries * HEAD), shifts.resize(heads * queries);
#pragma omp parallel for num_threads(threads) if (threads > 1 && given & TO_CODES)
        for (int64_t row = 0; row < heads * queries; row++) {
            float own[HEAD], *to = turned.data() + row * HEAD;
            for (int d = 0; d < HEAD; d++) own[d] = number(q[row * HEAD + d]) * (scale / LN_2);
            for (int d = 0; given & CENTER && d < HEAD; d++)
                shifts[row] += own[d] * number(center[row / queries * HEAD + d]);
            if (given & TO_CODES) multiply(own, to_codes, to);
            else std::copy_n(own, HEAD, to);
        }
    }

    // The product of a row x and a matrix [HEAD, HEAD].
    static void multiply(const float* x, const float* matrix, float* to) {
        Floats found[HEAD / LANES] = {};
        for (int i = 0; i < HEAD; i++)
            for (int v = 0; v < HEAD / LANES; v++) found[v] += load<Floats>(matrix + i * HEAD + v * LANES) * x[i];
        std::memcpy(to, found, sizeof(found));
    }

    void to_channels(float* x) const {
        if (from_codes) multiply(x, from_codes, x);
    }
};

// reading: of all heads; row: the first query of a head.
struct ReadBy {
    const Reading& reading;
    int64_t row;
};

struct Part : Codes {
    using Codes::Codes;

    void weigh_page(int64_t page) {
        hide(SINKS + page * PAGE, PAGE, scores, PAGE);
        weigh(PAGE, scores, PAGE, [](int, float) {});
    }

    template <typename Context>
    void score_keys_of(const Context& context, int64_t page) {
        const auto *scales = (const Scale*)context.pool(1, page), *zeros = (const Scale*)context.pool(2, page);
        score_page(context.pool(0, page), scales, zeros);
    }

    // Adds pages whose keys and values are packed.
    template <typename Context>
    void add_pages(const Context& context, int64_t begin, int64_t end) {
        for (int64_t page = begin; page < end; page++) {
            if (hides_page(page)) continue;
            score_keys_of(context, page);
            weigh_page(page);
            const auto *scales = (const Scale*)context.pool(4, page), *zeros = (const Scale*)context.pool(5, page);
            add_page(context.pool(3, page), scales, zeros);
        }
    }

    // Adds the tokens whose values are exact: pages [packed, key_pages), whose keys are packed, all later tokens, and
    // sinks.
    template <typename Context>
    void add_exact_tokens(const Context& context, int64_t packed, int64_t key_pages, int64_t total) {
        for (int64_t page = packed; page < key_pages; page++) {
            if (hides_page(page)) continue;
            score_keys_of(context, page);
            weigh_page(page);
            add_exact(PAGE, [&](int t) { return context.value(SINKS + page * PAGE + t); }, scores, PAGE);
        }
        const int64_t first = SINKS + std::max(packed, key_pages) * PAGE;
        add_all_exact(context, first, total, scores, PAGE, [](int, float) {});
    }
};

// Attention of the queries of each sample. q, out: [samples, heads, queries.count, HEAD]. For each sample, total is the
// number of tokens, packed the number of pages whose values are packed, and key_pages the number of pages whose keys are packed.
// scale: factor of the scores. contexts(b, head): the Context of a KV head of sample b.
template <typename Contexts>
void attend_all(
    const Token* q, float scale, Token* out, const int64_t* total, const int64_t* packed, const int64_t* key_pages,
    int64_t samples, int64_t heads, const Contexts& contexts, int64_t threads, const Queries& queries
) {
    std::vector<int64_t> sample_of, first(samples + 1);  // per part; the last one of a sample adds exact tokens
    for (int64_t b = 0; b < samples; b++) {
        first[b] = sample_of.size();
        sample_of.insert(sample_of.end(), packed[b] / PAGES_PER_PART + 1, b);
    }
    first[samples] = sample_of.size();
    const int64_t parts = first[samples], blocks = queries.blocks(), tasks = heads * blocks;
    const int64_t rows = parts * tasks * QUERIES;
    std::vector<float> outs(rows * HEAD), peak(rows), sum(rows);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < parts * tasks; i++) {
        const int64_t part = i / tasks, b = sample_of[part], begin = (part - first[b]) * PAGES_PER_PART;
        const int64_t head = i % tasks / blocks;
        const auto context = contexts(b, head);
        const Token* of_head = q + (b * heads + head) * queries.count * HEAD;
        Part found = queries.start<Part>(of_head, b, head, i % blocks, total[b], scale);
        found.begin(context, i % blocks * QUERIES, queries.in_block(i % blocks));
        found.add_pages(context, begin, std::min(begin + PAGES_PER_PART, packed[b]));
        if (part + 1 == first[b + 1]) {
            for (int r = 0; r < QUERIES; r++) context.reading.to_channels(found.out + r * HEAD);
            found.add_exact_tokens(context, packed[b], key_pages[b], total[b]);
        }
        std::copy(found.out, found.out + QUERIES * HEAD, outs.data() + i * QUERIES * HEAD);
        std::copy(found.peak, found.peak + QUERIES, peak.data() + i * QUERIES);
        std::copy(found.sum, found.sum + QUERIES, sum.data() + i * QUERIES);
    }
#pragma omp parallel for num_threads(threads) if (threads > 1 && samples > 1)
    for (int64_t b = 0; b < samples; b++)
        for (int64_t row = 0; row < heads * queries.count; row++) {
            const int64_t own = row / queries.count * blocks * QUERIES + row % queries.count;
            const float sink = queries.sink(row / queries.count, row % queries.count);
            float high = std::max(sink, peak[first[b] * tasks * QUERIES + own]), sums[HEAD] = {};
            for (int64_t part = first[b]; part < first[b + 1]; part++)
                high = std::max(high, peak[part * tasks * QUERIES + own]);
            float all = std::exp2(sink - high);
            const auto add = [&](int64_t part, float* sums) {
                const int64_t at = part * tasks * QUERIES + own;
                const float rescale = std::exp2(peak[at] - high);
                all += sum[at] * rescale;
                for (int d = 0; d < HEAD; d++) sums[d] += outs[at * HEAD + d] * rescale;
            };
            for (int64_t part = first[b]; part + 1 < first[b + 1]; part++) add(part, sums);
            contexts(b, row / queries.count).reading.to_channels(sums);
            add(first[b + 1] - 1, sums);
            Token* to = out + (b * heads * queries.count + row) * HEAD;
            for (int d = 0; d < HEAD; d++) round_to(to[d], attended(sums[d], all));
            if (queries.lse) queries.lse[b * heads * queries.count + row] = log_sum_exp(high, all);
        }
}

}  // namespace
