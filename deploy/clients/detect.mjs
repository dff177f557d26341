import ort from "onnxruntime-node";
import sharp from "sharp";

const session = await ort.InferenceSession.create("best.onnx");
const photo = sharp("photo.jpg").rotate().removeAlpha().toColourspace("srgb"); // rotate(): upright
const { data, info } = await photo.raw({ depth: "uchar" }).toBuffer({ resolveWithObject: true });
const image = new ort.Tensor("uint8", data, [info.height, info.width, info.channels]);
const thresholds = {
  conf: new ort.Tensor("float32", [0.4], [1]),
  iou: new ort.Tensor("float32", [0.45], [1]),
  max_det: new ort.Tensor("int64", [300n], [1]),
};
const { boxes, scores, classes } = await session.run({ image, ...thresholds });
scores.data.forEach((score, i) => {
  const box = Array.from(boxes.data.subarray(4 * i, 4 * i + 4), (side) => side.toFixed(1));
  console.log(`${classes.data[i]} ${score.toFixed(2)}: ${box.join(" ")}`);
});
