// Kernels around nvCOMP's batched zstd decoder: what is checked before and after it, and how
// decoded elements reach an output that is not laid out as the chunk is. At the end, what its
// encoder leaves undone.
//
// Pointers travel as 64-bit integers, and nothing is included, so that NVRTC needs no headers
// and a host compiler can run the same code in the tests.
//
// Layout of a zstd frame: RFC 8878. Hash: XXH64, github.com/Cyan4973/xxHash, xxhash_spec.md.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Bits of a chunk's verdict. The host names them in scgpu_tasks/io/decode.py.
#define HAS_HASH 1u      // the frame ends with a checksum: a note, not a fault
#define BAD_CRC 2u       // CRC-32C of the stored bytes differs
#define BAD_HEADER 4u    // no single frame that states the expected content size
#define BAD_BLOCKS 8u    // the blocks contradict themselves or the frame
#define BAD_STATUS 16u   // nvCOMP refused
#define BAD_SIZE 32u     // nvCOMP decoded another number of bytes
#define BAD_HASH 64u     // checksum of the decoded bytes differs

__device__ static u32 read16(const u8* p) { return p[0] | (u32)p[1] << 8; }
__device__ static u32 read24(const u8* p) { return read16(p) | (u32)p[2] << 16; }
__device__ static u32 read32(const u8* p) { return read24(p) | (u32)p[3] << 24; }

__device__ static u64 read64(const u8* p) {
  u64 at = (u64)p;
  if ((at & 7) == 0) return *(const u64*)p;
  if ((at & 3) == 0) return ((const u32*)p)[0] | (u64)((const u32*)p)[1] << 32;
  if ((at & 1) == 0) {
    const u16* q = (const u16*)p;
    return q[0] | (u64)q[1] << 16 | (u64)q[2] << 32 | (u64)q[3] << 48;
  }
  return read32(p) | (u64)read32(p + 4) << 32;
}

__device__ static u32 highest_bit(u32 x) {
  u32 n = 0;
  while (x >>= 1) ++n;
  return n;
}

// Bits [at, at + n) of a little-endian bit string; n <= 16. False past the end.
__device__ static bool take_bits(const u8* p, u32 size, u32 at, u32 n, u32* value) {
  if (((u64)at + n + 7) / 8 > size) return false;
  u32 window = 0;
  for (u32 i = 0; i < 4 && at / 8 + i < size; ++i) window |= (u32)p[at / 8 + i] << (8 * i);
  *value = (window >> (at % 8)) & ((1u << n) - 1);
  return true;
}

// Bytes that the description of an FSE table takes, or 0 where it is not valid.
__device__ static u32 fse_description(const u8* p, u32 size, u32 max_symbol, u32 max_log) {
  u32 value, at = 4, symbol = 0;
  if (size == 0) return 0;
  u32 log = (p[0] & 15u) + 5;
  if (log > max_log) return 0;
  int remaining = 1 << log;
  while (remaining > 0 && symbol <= max_symbol) {
    u32 bits = highest_bit(remaining + 1) + 1;
    u32 low = (1u << (bits - 1)) - 1;
    u32 threshold = (1u << bits) - 1 - (remaining + 1);
    // The last value of a table may be a bit shorter than the widest form.
    if (!take_bits(p, size, at, bits - 1, &value)) return 0;
    if (value < threshold) {
      at += bits - 1;
    } else {
      if (!take_bits(p, size, at, bits, &value)) return 0;
      at += bits;
      if (value > low) value -= threshold;
    }
    int probability = (int)value - 1;
    remaining -= probability < 0 ? 1 : probability;
    ++symbol;
    if (probability == 0) {
      do {
        if (!take_bits(p, size, at, 2, &value)) return 0;
        at += 2;
        symbol += value;
      } while (value == 3 && symbol <= max_symbol);
    }
  }
  if (remaining != 0 || symbol > max_symbol + 1) return 0;
  return (at + 7) / 8;
}

// Bytes that the description of a Huffman tree takes, or 0 where it is not valid.
__device__ static u32 huffman_description(const u8* p, u32 size) {
  if (size < 2) return 0;
  u32 head = p[0];
  if (head < 128) {
    if (head == 0 || head + 1 > size) return 0;
    u32 used = fse_description(p + 1, head, 12, 6);
    return used != 0 && used < head && p[head] != 0 ? head + 1 : 0;
  }
  u32 n = head - 127, bytes = (n + 1) / 2, sum = 0;
  if (1 + bytes > size) return 0;
  for (u32 i = 0; i < n; ++i) {
    u32 weight = i % 2 == 0 ? p[1 + i / 2] >> 4 : p[1 + i / 2] & 15u;
    if (weight > 12) return 0;
    if (weight > 0) sum += 1u << (weight - 1);
  }
  if (sum == 0 || highest_bit(sum) + 1 > 12) return 0;
  u32 rest = (2u << highest_bit(sum)) - sum;
  return (rest & (rest - 1)) == 0 ? 1 + bytes : 0;
}

// Bytes that the literals section takes, or 0 where it is not valid.
__device__ static u32 literals_section(const u8* p, u32 size, u32 max_block, bool* has_tree) {
  if (size == 0) return 0;
  u32 type = p[0] & 3u, form = p[0] >> 2 & 3u;
  if (type < 2) {
    u32 head = form == 1 ? 2 : form == 3 ? 3 : 1;
    if (head > size) return 0;
    u32 n = head == 1 ? p[0] >> 3 : (head == 2 ? read16(p) : read24(p)) >> 4;
    u32 stored = type == 0 ? n : 1;
    return n <= max_block && stored <= size - head ? head + stored : 0;
  }
  u32 head = form < 2 ? 3 : form == 2 ? 4 : 5, bits = form < 2 ? 10 : form == 2 ? 14 : 18;
  if (head > size) return 0;
  u64 word = read24(p);
  if (head > 3) word |= (u64)p[3] << 24;
  if (head > 4) word |= (u64)p[4] << 32;
  u32 mask = (1u << bits) - 1;
  u32 n = (u32)(word >> 4) & mask, stored = (u32)(word >> (4 + bits)) & mask;
  if (n > max_block || stored > size - head || stored == 0) return 0;
  const u8* streams = p + head;
  u32 left = stored;
  if (type == 2) {
    u32 tree = huffman_description(streams, left);
    if (tree == 0) return 0;
    streams += tree;
    left -= tree;
    *has_tree = true;
  } else if (!*has_tree) {
    return 0;
  }
  if (form == 0) return left > 0 && streams[left - 1] != 0 ? head + stored : 0;
  if (left < 10 || n < 6) return 0;
  u32 at = 6;
  for (u32 i = 0; i < 3; ++i) {
    u32 length = read16(streams + 2 * i);
    if (length == 0 || length >= left - at || streams[at + length - 1] == 0) return 0;
    at += length;
  }
  return streams[left - 1] != 0 ? head + stored : 0;
}

__device__ static bool sequences_section(const u8* p, u32 size, bool* has_tables) {
  if (size == 0) return false;
  u32 count = p[0], at = 1;
  if (count == 0) return size == 1;
  if (count >= 128) {
    u32 extra = count == 255 ? 2 : 1;
    if (size < 1 + extra) return false;
    count = extra == 1 ? (count - 128) << 8 | p[1] : read16(p + 1) + 0x7F00;
    at += extra;
  }
  if (at >= size || (p[at] & 3u) != 0) return false;
  u32 modes = p[at++];
  const u32 max_symbol[3] = {35, 31, 52}, max_log[3] = {9, 8, 9};
  for (u32 i = 0; i < 3; ++i) {
    u32 mode = modes >> (6 - 2 * i) & 3u;
    if (mode == 1) {
      if (at >= size || p[at] > max_symbol[i]) return false;
      ++at;
    } else if (mode == 2) {
      u32 used = fse_description(p + at, size - at, max_symbol[i], max_log[i]);
      if (used == 0) return false;
      at += used;
    } else if (mode == 3 && !*has_tables) {
      return false;
    }
  }
  *has_tables = true;
  return at < size && p[size - 1] != 0;
}

// Verdict of the blocks from p to the end of the frame.
__device__ static u32 check_blocks(const u8* p, u64 size, u64 content, u64 max_block) {
  bool has_tree = false, has_tables = false, last = false;
  while (!last) {
    if (size < 3) return BAD_BLOCKS;
    u32 head = read24(p), type = head >> 1 & 3u, n = head >> 3;
    last = (head & 1u) != 0;
    p += 3;
    size -= 3;
    u32 stored = type == 1 ? 1 : n;
    if (type == 3 || n > max_block || stored > size) return BAD_BLOCKS;
    if (type < 2) {
      if (n > content) return BAD_BLOCKS;
      content -= n;
    } else {
      u32 literals = literals_section(p, n, (u32)max_block, &has_tree);
      if (literals == 0 || !sequences_section(p + literals, n - literals, &has_tables))
        return BAD_BLOCKS;
    }
    p += stored;
    size -= stored;
  }
  return size == 0 ? 0 : BAD_BLOCKS;
}

// Verdict of one frame that should hold `content` bytes and nothing else.
__device__ static u32 check_frame(const u8* p, u64 size, u64 content) {
  if (size < 9 || read32(p) != 0xFD2FB528u) return BAD_HEADER;
  u32 head = p[4], single = head >> 5 & 1u, dictionary = head & 3u, width = head >> 6;
  u32 n_size = width == 0 ? single : 1u << width;
  u32 at = 5;
  if ((head & 8u) != 0 || dictionary != 0 || n_size == 0) return BAD_HEADER;
  u64 window = content;
  if (!single) {
    window = (u64)1 << (10 + (p[at] >> 3));
    window += (window >> 3) * (p[at] & 7u);
    ++at;
  }
  if (size < at + n_size + 3) return BAD_HEADER;
  u64 stated = 0;
  for (u32 i = 0; i < n_size; ++i) stated |= (u64)p[at + i] << (8 * i);
  if (n_size == 2) stated += 256;
  if (stated != content) return BAD_HEADER;
  at += n_size;
  u32 hash = head >> 2 & 1u;
  if (hash && size < at + 4) return BAD_HEADER;
  u64 max_block = window < 131072 ? window : 131072;
  return check_blocks(p + at, size - at - 4 * hash, content, max_block) | (hash ? HAS_HASH : 0);
}

// One thread a chunk; frames take courses of their own, so that blocks of one thread are
// fastest. A chunk that fails is replaced by a sound spare frame, so that nvCOMP,
// for which damaged input is undefined behaviour, never sees it.
extern "C" __global__ void check_frames(
    u64 source_p, u64 size_p, u64 verdict_p, u64 crc_p, u32 n, u64 content, u64 spare_p,
    u64 spare_size) {
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u64* source = (u64*)source_p;
  u64* sizes = (u64*)size_p;
  const u8* p = (const u8*)source[i];
  u32 verdict = 0;
  if (crc_p != 0 && ((const u32*)crc_p)[i] != read32(p + sizes[i])) verdict = BAD_CRC;
  if (verdict == 0) verdict = check_frame(p, sizes[i], content);
  if ((verdict & ~HAS_HASH) != 0) {
    verdict &= ~HAS_HASH;
    source[i] = spare_p;
    sizes[i] = spare_size;
  }
  ((u8*)verdict_p)[i] = (u8)verdict;
}

// One thread a chunk, for chunks that are stored raw: only their CRC-32C can be wrong.
extern "C" __global__ void check_crcs(u64 source_p, u64 size_p, u64 verdict_p, u64 crc_p, u32 n) {
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const u8* p = (const u8*)((const u64*)source_p)[i];
  u32 stored = read32(p + ((const u64*)size_p)[i]);
  ((u8*)verdict_p)[i] = ((const u32*)crc_p)[i] != stored ? BAD_CRC : 0;
}

__device__ static u64 rotate(u64 x, u32 n) { return x << n | x >> (64 - n); }

#define P1 0x9E3779B185EBCA87ull
#define P2 0xC2B2AE3D27D4EB4Full
#define P3 0x165667B19E3779F9ull
#define P4 0x85EBCA77C2B2AE63ull
#define P5 0x27D4EB2F165667C5ull

__device__ static u64 mix(u64 acc, u64 input) { return rotate(acc + input * P2, 31) * P1; }

// One of the four independent sums that XXH64 keeps over stripes of 32 bytes.
__device__ static u64 hash_lane(const u8* p, u64 size, u32 lane) {
  u64 acc = lane == 0 ? P1 + P2 : lane == 1 ? P2 : lane == 2 ? 0 : 0 - P1;
  u64 at = 8 * lane, end = size / 32 * 32;
  if ((((u64)p) & 7) == 0) {
#pragma unroll 8
    for (; at < end; at += 32) acc = mix(acc, *(const u64*)(p + at));
  } else {
#pragma unroll 8
    for (; at < end; at += 32) acc = mix(acc, read64(p + at));
  }
  return acc;
}

// The hash from its four sums and the bytes after the last whole stripe.
__device__ static u64 finish_hash(const u64* lanes, const u8* p, u64 size) {
  u64 hash = P5, at = size / 32 * 32;
  if (size >= 32) {
    hash = rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) +
           rotate(lanes[3], 18);
    for (u32 i = 0; i < 4; ++i) hash = (hash ^ mix(0, lanes[i])) * P1 + P4;
  }
  hash += size;
  for (; at + 8 <= size; at += 8) hash = rotate(hash ^ mix(0, read64(p + at)), 27) * P1 + P4;
  if (at + 4 <= size) {
    hash = rotate(hash ^ read32(p + at) * P1, 23) * P2 + P3;
    at += 4;
  }
  for (; at < size; ++at) hash = rotate(hash ^ p[at] * P5, 11) * P1;
  hash = (hash ^ hash >> 33) * P2;
  hash = (hash ^ hash >> 29) * P3;
  return hash ^ hash >> 32;
}

__device__ static bool to_hash(u32 verdict, u32 status, u64 actual, u64 content) {
  return verdict == HAS_HASH && status == 0 && actual == content;
}

// Four threads a chunk, after the decoder: the sums for the hash of what was decoded. Their
// loads of one stripe fall together, and no sum waits for another.
extern "C" __global__ void hash_lanes(
    u64 target_p, u64 actual_p, u64 status_p, u64 verdict_p, u64 lanes_p, u32 n, u64 content) {
  u32 at = blockIdx.x * blockDim.x + threadIdx.x, i = at / 4;
  if (i >= n) return;
  if (!to_hash(((const u8*)verdict_p)[i], ((const u32*)status_p)[i],
               ((const u64*)actual_p)[i], content))
    return;
  ((u64*)lanes_p)[at] = hash_lane((const u8*)((const u64*)target_p)[i], content, at % 4);
}

// One thread a chunk: add what the decoder reported, and compare the frame's hash.
extern "C" __global__ void judge(
    u64 source_p, u64 size_p, u64 target_p, u64 actual_p, u64 status_p, u64 verdict_p,
    u64 lanes_p, u32 n, u64 content) {
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u8* verdict = (u8*)verdict_p + i;
  u32 v = *verdict, status = ((const u32*)status_p)[i];
  u64 actual = ((const u64*)actual_p)[i];
  if ((v & ~HAS_HASH) != 0) return;
  if (status != 0) {
    v |= BAD_STATUS;
  } else if (actual != content) {
    v |= BAD_SIZE;
  } else if (to_hash(v, status, actual, content)) {
    const u8* stored = (const u8*)((const u64*)source_p)[i] + ((const u64*)size_p)[i] - 4;
    u64 hash = finish_hash(
        (const u64*)lanes_p + 4 * (u64)i, (const u8*)((const u64*)target_p)[i], content);
    if ((u32)hash != read32(stored)) v |= BAD_HASH;
  }
  *verdict = (u8)(v & ~HAS_HASH);
}

__device__ static void move(u8* to, const u8* from, u32 itemsize) {
  // Elements of 16 bytes are moved in halves; addresses may be odd inside a shard.
  u32 unit = itemsize < 8 ? itemsize : 8;
  if ((((u64)to | (u64)from) & (unit - 1)) != 0) {
    for (u32 i = 0; i < itemsize; ++i) to[i] = from[i];
    return;
  }
  switch (itemsize) {
    case 1: *to = *from; break;
    case 2: *(u16*)to = *(const u16*)from; break;
    case 4: *(u32*)to = *(const u32*)from; break;
    case 8: *(u64*)to = *(const u64*)from; break;
    default:
      for (u32 i = 0; i < itemsize / 8; ++i) ((u64*)to)[i] = ((const u64*)from)[i];
  }
}

// Move elements as jobs say: source address (0: the fill value), target address, number of
// elements, then for each axis count, source stride, target stride, first table entry or -1.
// blockIdx.y walks over the jobs, blockIdx.x over their elements.
extern "C" __global__ void scatter(
    u64 jobs_p, u32 n, u32 axes, u64 source_table_p, u64 target_table_p, u32 itemsize,
    u64 fill_low, u64 fill_high) {
  const i64* source_table = (const i64*)source_table_p;
  const i64* target_table = (const i64*)target_table_p;
  u64 fill[2] = {fill_low, fill_high};
  for (u32 j = blockIdx.y; j < n; j += gridDim.y) {
    const i64* job = (const i64*)jobs_p + (u64)j * (3 + 4 * axes);
    const u8* source = (const u8*)job[0];
    u8* target = (u8*)job[1];
    u64 total = (u64)job[2];
    for (u64 e = (u64)blockIdx.x * blockDim.x + threadIdx.x; e < total;
         e += (u64)gridDim.x * blockDim.x) {
      u32 rest = (u32)e;
      i64 from = 0, to = 0;
      for (u32 a = axes; a-- > 0;) {
        const i64* walk = job + 3 + 4 * a;
        u32 i = rest;
        if (a > 0) {
          u32 count = (u32)walk[0];
          rest = i / count;
          i -= rest * count;
        }
        if (walk[3] < 0) {
          from += i * walk[1];
          to += i * walk[2];
        } else {
          from += source_table[walk[3] + i];
          to += target_table[walk[3] + i];
        }
      }
      move(target + to, source != 0 ? source + from : (const u8*)fill, itemsize);
    }
  }
}

// After the encoder, one thread a chunk: end its frame with the hash of its content, which the
// header announces then. Frames lie `stride` bytes apart, and have room for it.
extern "C" __global__ void seal(
    u64 frames, u64 stride, u64 size_p, u64 value_p, u64 lane_p, u32 n, u64 content) {
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u8* frame = (u8*)(frames + i * stride);
  u64* size = (u64*)size_p + i;
  u64 hash = finish_hash(
      (const u64*)lane_p + 4 * (u64)i, (const u8*)((const u64*)value_p)[i], content);
  frame[4] |= 4;
  for (u32 k = 0; k < 4; ++k) frame[*size + k] = (u8)(hash >> (8 * k));
  *size += 4;
}

// One block a frame: bring them together, each to where the sizes of all before it end.
extern "C" __global__ void pack(u64 frames, u64 stride, u64 size_p, u64 end_p, u64 packed) {
  u64 size = ((const u64*)size_p)[blockIdx.x];
  const u8* from = (const u8*)(frames + blockIdx.x * stride);
  u8* to = (u8*)packed + ((const u64*)end_p)[blockIdx.x] - size;
  for (u64 i = threadIdx.x; i < size; i += blockDim.x) to[i] = from[i];
}
